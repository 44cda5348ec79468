/* Lets opening a file fail, for tests: while the file that FAILING_OPENS names is there, open() of a
 * path that holds its second line fails with the errno in its first one; so does opendir(). */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int (*opener)(const char *, int, ...);

static int failure(const char *path) {
    const char *control = getenv("FAILING_OPENS");
    char text[4096] = "";
    if (!control || !path) return 0;
    opener sound = (opener)dlsym(RTLD_NEXT, "open");
    int file = sound(control, O_RDONLY);
    if (file < 0) return 0;
    if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
    close(file);
    char *line = strchr(text, '\n');
    if (!line) return 0;
    *line = 0;
    return strstr(path, line + 1) ? atoi(text) : 0;
}

static int opened(const char *name, const char *path, int flags, mode_t mode) {
    int saved = errno, failed = failure(path);
    if (failed) {
        errno = failed;
        return -1;
    }
    errno = saved;
    return ((opener)dlsym(RTLD_NEXT, name))(path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return opened("open", path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;
    va_end(more);
    return opened("open64", path, flags, mode);
}

DIR *opendir(const char *path) {
    int failed = failure(path);
    if (failed) {
        errno = failed;
        return NULL;
    }
    return ((DIR * (*)(const char *)) dlsym(RTLD_NEXT, "opendir"))(path);
}
