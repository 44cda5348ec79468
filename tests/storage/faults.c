/* Planted disk faults, preloaded into a child process.
 *
 * FAULT_FILE: while this file exists, its first letter decides what fails:
 *   f  every write: no space left (ENOSPC)
 *   s  every sync: input/output error (EIO)
 * LIVE_DIR, SYNCED_DIR: at each sync of a file in LIVE_DIR its whole content is copied to SYNCED_DIR,
 *   which so becomes what a loss of power would surely leave: nothing that was never synced, no name
 *   before its directory was synced, and no removal either.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char fault(void) {
    const char *path = getenv("FAULT_FILE");
    if (!path) return 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    char letter = 0;
    ssize_t got = read(fd, &letter, 1);
    close(fd);
    return got == 1 ? letter : 0;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    if (fault() == 'f') { errno = ENOSPC; return -1; }
    return NEXT(pwrite64)(fd, data, size, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return pwrite64(fd, data, size, at);
}

static void copy_content(int fd, const char *target) {
    char temporary[4200], block[65536];
    snprintf(temporary, sizeof temporary, "%s.part", target);
    int out = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    off_t at = 0;
    for (ssize_t got; (got = pread(fd, block, sizeof block, at)) > 0; at += got)
        if (write(out, block, got) != got) abort();
    close(out);
    if (rename(temporary, target)) abort();
}

/* A file whose name is not durable yet waits as NAME.unnamed. */
static void keep_file(int fd, const char *folder, const char *name) {
    char target[4096];
    snprintf(target, sizeof target, "%s/%s", folder, name);
    if (access(target, F_OK)) snprintf(target, sizeof target, "%s/%s.unnamed", folder, name);
    copy_content(fd, target);
}

static void keep_names(const char *live, const char *folder) {
    DIR *names = opendir(folder);
    for (struct dirent *entry; (entry = readdir(names));) {
        char kept[4096], original[4096];
        if (entry->d_name[0] == '.') continue;
        snprintf(kept, sizeof kept, "%s/%s", folder, entry->d_name);
        snprintf(original, sizeof original, "%s/%s", live, entry->d_name);
        char *suffix = strstr(original, ".unnamed");
        if (suffix) *suffix = 0;
        if (access(original, F_OK)) {
            if (unlink(kept)) abort();
        } else if (suffix) {
            char named[4096];
            snprintf(named, sizeof named, "%.*s", (int)(strlen(kept) - 8), kept);
            if (rename(kept, named)) abort();
        }
    }
    closedir(names);
}

static void keep_copy(int fd) {
    const char *live = getenv("LIVE_DIR"), *folder = getenv("SYNCED_DIR");
    char link[64], path[4096];
    if (!live || !folder) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    size_t prefix = strlen(live);
    if (strncmp(path, live, prefix)) return;
    if (path[prefix] == 0) keep_names(live, folder);
    else if (path[prefix] == '/') keep_file(fd, folder, path + prefix + 1);
}

int fdatasync(int fd) {
    if (fault() == 's') { errno = EIO; return -1; }
    keep_copy(fd);
    return NEXT(fdatasync)(fd);
}

int fsync(int fd) {
    if (fault() == 's') { errno = EIO; return -1; }
    keep_copy(fd);
    return NEXT(fsync)(fd);
}
