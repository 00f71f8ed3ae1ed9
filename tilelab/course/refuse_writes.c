// A library for LD_PRELOAD that makes folders look read-only or full to a process, for tilelab/reliability.py.
//
// TILES_REFUSED holds absolute folders, separated by colons. With TILES_REFUSAL=read-only every call that would open a
// file below them for writing, or make, rename or remove one, fails with EROFS. With TILES_REFUSAL=full a file can be
// made, as on many full disks, but writing to it fails with ENOSPC. Calls that succeed are passed on unchanged.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_refusal(const char* kind) {
    const char* set = getenv("TILES_REFUSAL");
    return set && !strcmp(set, kind);
}

static int lies_below(const char* path) {
    const char* folders = getenv("TILES_REFUSED");
    while (folders && *folders) {
        size_t length = strcspn(folders, ":");
        if (length && !strncmp(path, folders, length) && (path[length] == '/' || !path[length])) return 1;
        folders += length + (folders[length] == ':');
    }
    return 0;
}

static int fd_lies_below(int fd) {
    char link[40], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return lies_below(path);
}

// Return whether a path, relative to the open folder `at` unless it is absolute, lies below a refused folder.
static int path_lies_below(int at, const char* path) {
    char whole[2 * PATH_MAX] = "", link[40] = "/proc/self/cwd";
    if (!path) return 0;
    if (path[0] == '/') return lies_below(path);
    if (at != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t length = readlink(link, whole, PATH_MAX);
    if (length <= 0) return 0;
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return lies_below(whole);
}

static int refuse(int error) {
    errno = error;
    return -1;
}

// A read-only disk still says EEXIST of a folder that is there, and ENOENT of a file to remove that is not.
static int refuses_change(int at, const char* path, int needs_file) {
    if (!is_refusal("read-only") || !path_lies_below(at, path)) return 0;
    int kept = errno, exists = !faccessat(at, path, F_OK, AT_SYMLINK_NOFOLLOW);
    errno = kept;
    return exists == needs_file;
}

static int refuses_open(int at, const char* path, int flags) {
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) || !is_refusal("read-only")) return 0;
    if (!path_lies_below(at, path)) return 0;
    return (flags & (O_WRONLY | O_RDWR | O_TRUNC)) || faccessat(at, path, F_OK, 0);
}

#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, last); mode = va_arg(rest, int); va_end(rest); }
#define DEFINE_OPEN(name) \
    int name(const char* path, int flags, ...) { \
        MODE(flags, flags) \
        return refuses_open(AT_FDCWD, path, flags) ? refuse(EROFS) : NEXT(name)(path, flags, mode); \
    }
#define DEFINE_OPENAT(name) \
    int name(int at, const char* path, int flags, ...) { \
        MODE(flags, flags) \
        return refuses_open(at, path, flags) ? refuse(EROFS) : NEXT(name)(at, path, flags, mode); \
    }
#define DEFINE_FOPEN(name) \
    FILE* name(const char* path, const char* how) { \
        int flags = strpbrk(how, "wa+") ? O_WRONLY | O_CREAT : O_RDONLY; \
        return refuses_open(AT_FDCWD, path, flags) ? (refuse(EROFS), NULL) : NEXT(name)(path, how); \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)
DEFINE_FOPEN(fopen)
DEFINE_FOPEN(fopen64)

int mkdir(const char* path, mode_t mode) {
    return refuses_change(AT_FDCWD, path, 0) ? refuse(EROFS) : NEXT(mkdir)(path, mode);
}

int mkdirat(int at, const char* path, mode_t mode) {
    return refuses_change(at, path, 0) ? refuse(EROFS) : NEXT(mkdirat)(at, path, mode);
}

int unlink(const char* path) { return refuses_change(AT_FDCWD, path, 1) ? refuse(EROFS) : NEXT(unlink)(path); }

int unlinkat(int at, const char* path, int flags) {
    return refuses_change(at, path, 1) ? refuse(EROFS) : NEXT(unlinkat)(at, path, flags);
}

int rename(const char* from, const char* to) {
    return refuses_change(AT_FDCWD, from, 1) ? refuse(EROFS) : NEXT(rename)(from, to);
}

#define DEFINE_WRITE(name, ...) \
    ssize_t name(int fd, __VA_ARGS__) { \
        return is_refusal("full") && fd_lies_below(fd) ? refuse(ENOSPC) : NEXT(name)(fd, ARGUMENTS); \
    }
#define ARGUMENTS data, size
DEFINE_WRITE(write, const void* data, size_t size)
#undef ARGUMENTS
#define ARGUMENTS data, size, offset
DEFINE_WRITE(pwrite, const void* data, size_t size, off_t offset)
DEFINE_WRITE(pwrite64, const void* data, size_t size, off64_t offset)
#undef ARGUMENTS
#define ARGUMENTS parts, count
DEFINE_WRITE(writev, const struct iovec* parts, int count)

// The C library does not call its own `write` by name, so the linker's and the compiler's output is refused here.
size_t fwrite(const void* data, size_t size, size_t count, FILE* file) {
    if (is_refusal("full") && fd_lies_below(fileno(file))) return refuse(ENOSPC), 0;
    return NEXT(fwrite)(data, size, count, file);
}
