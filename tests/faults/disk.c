/* A disk that can lose power, fill up and fail, preloaded into the processes that write to it.
 *
 * DISK_ROOT   the folder that stands for the disk; calls on anything else pass untouched
 * DISK_STATE  a folder beside it: `control`, one shared page (struct control, see disk.py);
 *             `log.<pid>`, what each process did; `inodes/`, a hard link to every file ever made,
 *             so that nothing that a power cut must bring back is gone
 *
 * Every write is logged before it happens, with the bytes that it replaces and those it puts there;
 * so is every change of a name. A sync is logged after it succeeded, under a number taken before it
 * began: it covers what has a lower number. disk.py turns that into what a power cut leaves behind.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum kind { WRITE, SYNC, DIRSYNC, OPEN, RENAME, UNLINK, TRUNCATE, CREATE, MKDIR, LINK, KINDS };
enum { KILL = -1, FAIL_THEN_KILL = -2 };

struct control {
    uint64_t sequence;
    int64_t clock_shift;      /* nanoseconds added to the wall clock */
    int64_t full;             /* 1: no file can grow, none can be made */
    int64_t role, kind;       /* whose call of which kind fails */
    uint64_t first, count;    /* the first call that fails, and how many do from there on */
    int64_t action;           /* an errno, KILL, or FAIL_THEN_KILL */
    uint64_t fired;           /* how many calls failed so far */
    int64_t retry;            /* 1: a sync that failed is called again, and then succeeds */
    int64_t hang;             /* 1: no call returns before it is 0 again */
    uint64_t calls[3][KINDS]; /* of a role: 0 the collector, 1 its shard writer, 2 the trainer */
};

struct head {
    uint32_t magic, kind;
    uint64_t sequence, inode;
    int64_t offset, old_size;
    uint32_t failed, path, target, old, fresh, spare; /* lengths of what follows, in this order */
};

static struct control nothing, *control = &nothing;
static const char *root, *state;
static size_t root_length;
static int log_fd = -1, role;

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static int real_open(const char *path, int flags) {
    REAL(open64);
    return real(path, flags, 0644);
}

/* Each process has a log of its own, a forked one too. */
static void open_log(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/log.%d", state, getpid());
    if (log_fd >= 0) close(log_fd);
    if ((log_fd = real_open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC)) < 0) abort();
}

__attribute__((constructor)) static void begin(void) {
    char path[PATH_MAX], command[4096] = {0};
    root = getenv("DISK_ROOT");
    state = getenv("DISK_STATE");
    if (!root || !state) { root = NULL; return; }
    root_length = strlen(root);
    int fd = real_open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = read(fd, command, sizeof command - 1);
    close(fd);
    for (char *at = command; at < command + length; at += strlen(at) + 1)
        if (!strcmp(at, "write-shards")) role = 1;
        else if (!strcmp(at, "--follow") || !strcmp(at, "tests.faults.loop.trainer_forks")) role = 2;
    snprintf(path, sizeof path, "%s/control", state);
    if ((fd = real_open(path, O_RDWR | O_CLOEXEC)) < 0) abort();
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (control == MAP_FAILED) abort();
    open_log();
    pthread_atfork(NULL, NULL, open_log);
}

/* --- what is on the disk ------------------------------------------------------------------- */

static int is_below(const char *path) {
    return root && !strncmp(path, root, root_length) && (!path[root_length] || path[root_length] == '/');
}

/* The absolute path of (dirfd, path); whether it is on the disk. */
static int place(int dirfd, const char *path, char *found) {
    char base[PATH_MAX] = "", link[64];
    if (!root || log_fd < 0) return 0;
    if (path[0] != '/') {
        if (dirfd == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0) return 0;
            base[length] = 0;
        }
        if (snprintf(found, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    } else if (snprintf(found, PATH_MAX, "%s", path) >= PATH_MAX) return 0;
    return is_below(found);
}

/* Whether a descriptor is a file or a folder on the disk. */
static int holds(int fd, struct stat *about, char *path) {
    char link[64];
    if (!root || log_fd < 0 || fstat(fd, about)) return 0;
    if (!S_ISREG(about->st_mode) && !S_ISDIR(about->st_mode)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static uint64_t number(void) { return __atomic_add_fetch(&control->sequence, 1, __ATOMIC_SEQ_CST); }

/* 0, or the error that this call has to fail with. Does not return if it is a kill. */
static int strike(enum kind kind) {
    while (__atomic_load_n(&control->hang, __ATOMIC_SEQ_CST)) usleep(1000);
    uint64_t call = __atomic_add_fetch(&control->calls[role][kind], 1, __ATOMIC_SEQ_CST);
    if (!control->count || control->role != role || control->kind != (int)kind) return 0;
    if (call < control->first || call >= control->first + control->count) return 0;
    __atomic_add_fetch(&control->fired, 1, __ATOMIC_SEQ_CST);
    if (control->action > 0) return control->action;
    if (control->action == FAIL_THEN_KILL && call == control->first) return EIO;
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void put_log(struct head *head, const char *path, const char *target, const void *old,
                    const struct iovec *fresh, int count) {
    struct iovec all[4 + 64];
    head->magic = 0x4b534944; /* "DISK" */
    head->path = path ? strlen(path) : 0;
    head->target = target ? strlen(target) : 0;
    if (!head->sequence) head->sequence = number();
    all[0] = (struct iovec){head, sizeof *head};
    all[1] = (struct iovec){(void *)path, head->path};
    all[2] = (struct iovec){(void *)target, head->target};
    all[3] = (struct iovec){(void *)old, head->old};
    if (count > 64) abort();
    size_t total = sizeof *head + head->path + head->target + head->old;
    for (int n = 0; n < count; n++) {
        all[4 + n] = fresh[n];
        head->fresh += fresh[n].iov_len;
    }
    total += head->fresh;
    REAL(writev);
    if (real(log_fd, all, 4 + count) != (ssize_t)total) abort();
}

/* The bytes of a file in [at, at + size), as far as there are any. */
static void *read_old(int fd, off64_t at, size_t size, struct head *head) {
    char link[64];
    if (at >= head->old_size) return NULL;
    if (size > (size_t)(head->old_size - at)) size = head->old_size - at;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd); /* fd itself may be for writing only */
    int again = real_open(link, O_RDONLY | O_CLOEXEC);
    void *old = malloc(size);
    if (again < 0 || pread(again, old, size, at) != (ssize_t)size) abort();
    close(again);
    head->old = size;
    return old;
}

/* --- writing ------------------------------------------------------------------------------- */

/* Before a write: log it, or fail. `at` < 0: where the descriptor stands. */
static int before_write(int fd, const struct iovec *data, int count, off64_t at) {
    struct stat about;
    char path[PATH_MAX];
    if (!holds(fd, &about, path)) return 0;
    int error = strike(WRITE);
    if (error) return error;
    size_t size = 0;
    for (int n = 0; n < count; n++) size += data[n].iov_len;
    if (at < 0) at = fcntl(fd, F_GETFL) & O_APPEND ? about.st_size : lseek64(fd, 0, SEEK_CUR);
    if (control->full && at + (off64_t)size > about.st_size) return ENOSPC;
    struct head head = {.kind = WRITE, .inode = about.st_ino, .offset = at, .old_size = about.st_size};
    void *old = read_old(fd, at, size, &head);
    put_log(&head, NULL, NULL, old, data, count);
    free(old);
    return 0;
}

#define WRITES(call, data, count, at) \
    int error = before_write(fd, data, count, at); \
    if (error) { errno = error; return -1; } \
    return call

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    struct iovec one = {(void *)data, size};
    WRITES(real(fd, data, size), &one, 1, -1);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    struct iovec one = {(void *)data, size};
    WRITES(real(fd, data, size, at), &one, 1, at);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }

ssize_t writev(int fd, const struct iovec *data, int count) {
    REAL(writev);
    WRITES(real(fd, data, count), data, count, -1);
}

ssize_t pwritev64(int fd, const struct iovec *data, int count, off64_t at) {
    REAL(pwritev64);
    WRITES(real(fd, data, count, at), data, count, at);
}

ssize_t pwritev(int fd, const struct iovec *data, int count, off_t at) {
    return pwritev64(fd, data, count, at);
}

ssize_t pwritev64v2(int fd, const struct iovec *data, int count, off64_t at, int flags) {
    REAL(pwritev64v2);
    WRITES(real(fd, data, count, at, flags), data, count, at);
}

static void log_truncation(int fd, const struct stat *about, off64_t length) {
    struct head head = {.kind = TRUNCATE, .inode = about->st_ino, .offset = length,
                        .old_size = about->st_size};
    void *old = read_old(fd, length, about->st_size, &head);
    put_log(&head, NULL, NULL, old, NULL, 0);
    free(old);
}

int ftruncate64(int fd, off64_t length) {
    REAL(ftruncate64);
    struct stat about;
    char path[PATH_MAX];
    if (holds(fd, &about, path)) {
        int error = strike(TRUNCATE);
        if (!error && control->full && length > about.st_size) error = ENOSPC;
        if (error) { errno = error; return -1; }
        log_truncation(fd, &about, length);
    }
    return real(fd, length);
}

int ftruncate(int fd, off_t length) { return ftruncate64(fd, length); }

static int syncs(int fd, int (*real)(int)) {
    struct stat about;
    char path[PATH_MAX];
    if (!holds(fd, &about, path)) return real(fd);
    enum kind kind = S_ISDIR(about.st_mode) ? DIRSYNC : SYNC;
    struct head head = {.kind = kind, .inode = about.st_ino, .sequence = number()};
    int error = strike(kind), result = 0;
    if (error) head.failed = 1;
    else if ((result = real(fd))) return result;
    put_log(&head, path, NULL, NULL, NULL, 0);
    if (error && control->retry) return syncs(fd, real);
    if (error) { errno = error; return -1; }
    return 0;
}

int fdatasync(int fd) {
    REAL(fdatasync);
    return syncs(fd, real);
}

int fsync(int fd) {
    REAL(fsync);
    return syncs(fd, real);
}

/* --- names --------------------------------------------------------------------------------- */

/* Whether a new file was kept; 0 if another thread or process has removed it already. */
static int keep(uint64_t inode, const char *path) {
    char kept[PATH_MAX];
    snprintf(kept, sizeof kept, "%s/inodes/%lu", state, inode);
    if (!link(path, kept) || errno == EEXIST) return 1;
    if (errno != ENOENT) abort();
    return 0;
}

static int opens(int dirfd, const char *path, int flags, mode_t mode) {
    REAL(openat64);
    char found[PATH_MAX];
    if (!place(dirfd, path, found)) return real(dirfd, path, flags, mode);
    int error = strike(OPEN), there = !access(found, F_OK);
    if (!error && control->full && !there && flags & O_CREAT) error = ENOSPC;
    if (error) { errno = error; return -1; }
    int fd = real(dirfd, path, flags & ~O_TRUNC, mode);
    struct stat about;
    if (fd < 0 || fstat(fd, &about) || !S_ISREG(about.st_mode)) return fd;
    if (!there) {
        struct head head = {.kind = CREATE, .inode = about.st_ino};
        if (!keep(about.st_ino, found)) { /* as if it had been removed before this call */
            close(fd);
            errno = ENOENT;
            return -1;
        }
        put_log(&head, found, NULL, NULL, NULL, 0);
    } else if (flags & O_TRUNC && ftruncate64(fd, 0)) {
        close(fd);
        return -1;
    }
    return fd;
}

#define OPENS(dirfd) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    } \
    return opens(dirfd, path, flags, mode)

int open(const char *path, int flags, ...) { OPENS(AT_FDCWD); }
int open64(const char *path, int flags, ...) { OPENS(AT_FDCWD); }
int openat(int dirfd, const char *path, int flags, ...) { OPENS(dirfd); }
int openat64(int dirfd, const char *path, int flags, ...) { OPENS(dirfd); }

int renameat(int from, const char *old, int to, const char *new) {
    REAL(renameat);
    char source[PATH_MAX], target[PATH_MAX];
    if (place(from, old, source) && place(to, new, target)) {
        struct stat about;
        int error = strike(RENAME);
        if (error) { errno = error; return -1; }
        if (!stat(source, &about)) {
            struct head head = {.kind = RENAME, .inode = about.st_ino};
            int taken = S_ISDIR(about.st_mode) && !access(target, F_OK); /* then it may fail */
            if (taken && real(from, old, to, new)) return -1;
            put_log(&head, source, target, NULL, NULL, 0);
            if (taken) return 0;
        }
    }
    return real(from, old, to, new);
}

int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

/* A further name of a file is made as the first one is. */
int linkat(int from, const char *old, int to, const char *new, int flags) {
    REAL(linkat);
    char source[PATH_MAX], target[PATH_MAX];
    if (!place(to, new, target)) return real(from, old, to, new, flags);
    int error = strike(LINK);
    if (!error && control->full) error = ENOSPC;
    if (error) { errno = error; return -1; }
    struct stat about;
    if (place(from, old, source) && !stat(source, &about) && access(target, F_OK)) {
        struct head head = {.kind = CREATE, .inode = about.st_ino};
        if (keep(about.st_ino, source)) put_log(&head, target, NULL, NULL, NULL, 0);
    }
    return real(from, old, to, new, flags);
}

int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int unlinkat(int dirfd, const char *path, int flags) {
    REAL(unlinkat);
    char found[PATH_MAX];
    if (place(dirfd, path, found)) {
        struct head head = {.kind = UNLINK};
        int error = strike(UNLINK);
        if (error) { errno = error; return -1; }
        if (!access(found, F_OK)) put_log(&head, found, NULL, NULL, NULL, 0);
    }
    return real(dirfd, path, flags);
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int dirfd, const char *path, mode_t mode) {
    REAL(mkdirat);
    char found[PATH_MAX];
    if (!place(dirfd, path, found)) return real(dirfd, path, mode);
    if (control->full) { errno = ENOSPC; return -1; }
    if (!access(found, F_OK)) { errno = EEXIST; return -1; }
    struct head head = {.kind = MKDIR};
    put_log(&head, found, NULL, NULL, NULL, 0);
    return real(dirfd, path, mode);
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* --- the wall clock ------------------------------------------------------------------------ */

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int result = real(clock, now);
    if (result || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return result;
    int64_t moment = now->tv_sec * 1000000000LL + now->tv_nsec + control->clock_shift;
    *now = (struct timespec){moment / 1000000000LL, moment % 1000000000LL};
    return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    *now = (struct timeval){exact.tv_sec, exact.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
