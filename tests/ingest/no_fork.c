/* Preloaded: while the file that NO_FORK names is there, no process can be forked. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

pid_t fork(void) {
    if (access(getenv("NO_FORK"), F_OK) == 0) {
        errno = EAGAIN;
        return -1;
    }
    pid_t (*real)(void) = (pid_t (*)(void))dlsym(RTLD_NEXT, "fork");
    return real();
}
