/* Kill points inside system calls, and a log of what was written and synced; loaded by LD_PRELOAD into every process.

   CHAOS_FS_HOME   only files below this folder count
   CHAOS_FS_LOG    a file that gets one line for each call: what, inode, size, path (and the old path of a rename)
   CHAOS_FS_KILL   call, moment, count and pattern, as "rename after 2 store/objects/X/X": kill the process group at the second
                   such call of one process. Moments: before, half (of a write), after. The pattern is of fnmatch.

   Processes that are forked, not executed, call chaos_read_plan() once their environment says what to do. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILES 4096

static char home[PATH_MAX], planned_call[16], planned_moment[16], pattern[PATH_MAX];
static size_t home_length;
static int log_file = -1, planned_count, seen;
static struct { ino_t inode; char dirty, inside; char path[512]; } known[FILES];

#define REAL(result, name, ...) \
    static result (*real_##name)(__VA_ARGS__); \
    if (!real_##name) real_##name = dlsym(RTLD_NEXT, #name)

void chaos_read_plan(void) {
    const char *place = getenv("CHAOS_FS_HOME"), *log = getenv("CHAOS_FS_LOG"), *plan = getenv("CHAOS_FS_KILL");
    home_length = 0;
    planned_call[0] = 0;
    seen = 0;
    memset(known, 0, sizeof known);
    if (log_file >= 0) syscall(SYS_close, log_file);
    log_file = -1;
    if (!place || strlen(place) >= sizeof home) return;
    strcpy(home, place);
    home_length = strlen(home);
    if (log) log_file = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (plan && sscanf(plan, "%15s %15s %d %4095s", planned_call, planned_moment, &planned_count, pattern) != 4)
        planned_call[0] = 0;
}

__attribute__((constructor)) static void loaded(void) { chaos_read_plan(); }

static void note(const char *what, ino_t inode, long long size, const char *path, const char *old) {
    char line[2 * PATH_MAX];
    if (log_file < 0) return;
    int length = snprintf(line, sizeof line, "%s\t%llu\t%lld\t%s%s%s\n", what, (unsigned long long)inode, size, path,
                          old ? "\t" : "", old ? old : "");
    if (length > 0) syscall(SYS_write, log_file, line, (size_t)length);
}

/* The part of a path below the home; NULL for all others. */
static const char *below(const char *path) {
    if (!home_length || strncmp(path, home, home_length) || path[home_length] != '/') return NULL;
    return path + home_length + 1;
}

static const char *below_at(int folder, const char *name, char *place) {
    if (!home_length || !name) return NULL;
    if (name[0] == '/') return below(name);
    char link[64];
    if (folder == AT_FDCWD) {
        if (syscall(SYS_getcwd, place, PATH_MAX) <= 0) return NULL;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, place, PATH_MAX - 1);
        if (length <= 0) return NULL;
        place[length] = 0;
    }
    size_t length = strlen(place);
    if (length + strlen(name) + 2 > PATH_MAX) return NULL;
    place[length] = '/';
    strcpy(place + length + 1, name);
    return below(place);
}

/* The path below the home that a descriptor is open at; remembered until the descriptor is another file. */
static const char *of_file(int file, struct stat *now) {
    if (!home_length || file < 0 || file >= FILES || file == log_file) return NULL;
    if (syscall(SYS_fstat, file, now)) return NULL;
    if (!S_ISREG(now->st_mode) && !S_ISDIR(now->st_mode)) return NULL;
    if (known[file].inode != now->st_ino) {
        char link[64], place[PATH_MAX];
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, place, sizeof place - 1);
        place[length > 0 ? length : 0] = 0;
        const char *found = below(place);
        known[file].inode = now->st_ino;
        known[file].dirty = 0;
        known[file].inside = found != NULL;
        snprintf(known[file].path, sizeof known[file].path, "%s", found ? found : "");
    }
    return known[file].inside ? known[file].path : NULL;
}

static int now(const char *call, const char *moment, const char *path) {
    if (!planned_call[0] || !path || strcmp(call, planned_call)) return 0;
    return !strcmp(moment, planned_moment) && !fnmatch(pattern, path, 0) && ++seen == planned_count;
}

static void die(const char *call, const char *moment, const char *path) {
    note("killed", 0, 0, path, call);
    (void)moment;
    syscall(SYS_kill, 0, SIGKILL);
    for (;;) pause();
}

#define AT(call, moment, path) if (now(call, moment, path)) die(call, moment, path)

static long long size_of(const char *path, ino_t *inode) {
    struct stat found;
    if (syscall(SYS_newfstatat, AT_FDCWD, path, &found, AT_SYMLINK_NOFOLLOW)) return *inode = 0, -1;
    *inode = found.st_ino;
    return found.st_size;
}

/* -- writing and syncing ------------------------------------------------------------------------------------------- */

static const char *before_write(int file) {
    struct stat found;
    int error = errno;
    const char *path = of_file(file, &found);
    if (path) {
        if (!known[file].dirty) note("write", found.st_ino, found.st_size, path, NULL);
        known[file].dirty = 1;
        AT("write", "before", path);
    }
    errno = error;
    return path;
}

ssize_t write(int file, const void *data, size_t count) {
    REAL(ssize_t, write, int, const void *, size_t);
    const char *path = before_write(file);
    if (path && now("write", "half", path)) real_write(file, data, count / 2), die("write", "half", path);
    ssize_t done = real_write(file, data, count);
    AT("write", "after", path);
    return done;
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    const char *path = before_write(file);
    ssize_t done = real_writev(file, parts, count);
    AT("write", "after", path);
    return done;
}

static ssize_t write_at(ssize_t (*real)(int, const void *, size_t, off64_t), int file, const void *data, size_t count,
                        off64_t place) {
    const char *path = before_write(file);
    if (path && now("write", "half", path)) real(file, data, count / 2, place), die("write", "half", path);
    ssize_t done = real(file, data, count, place);
    AT("write", "after", path);
    return done;
}

ssize_t pwrite(int file, const void *data, size_t count, off_t place) {
    REAL(ssize_t, pwrite, int, const void *, size_t, off64_t);
    return write_at(real_pwrite, file, data, count, place);
}

ssize_t pwrite64(int file, const void *data, size_t count, off64_t place) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off64_t);
    return write_at(real_pwrite64, file, data, count, place);
}

static int synced(int (*real)(int), int file) {
    struct stat found;
    const char *path = of_file(file, &found);
    AT("fsync", "before", path);
    int result = real(file);
    int error = errno;
    if (path && result == 0) {
        known[file].dirty = 0;
        note("sync", found.st_ino, found.st_size, path, NULL);
    }
    AT("fsync", "after", path);
    errno = error;
    return result;
}

int fsync(int file) {
    REAL(int, fsync, int);
    return synced(real_fsync, file);
}

int fdatasync(int file) {
    REAL(int, fdatasync, int);
    return synced(real_fdatasync, file);
}

/* -- names --------------------------------------------------------------------------------------------------------- */

static int renamed(int old_folder, const char *old, int new_folder, const char *new, unsigned flags) {
    char old_place[PATH_MAX], new_place[PATH_MAX], whole[2 * PATH_MAX];
    const char *from = below_at(old_folder, old, old_place), *to = below_at(new_folder, new, new_place);
    long long replaced = -1;
    ino_t inode;
    if (from && to) {
        snprintf(whole, sizeof whole, "%s/%s", home, to);
        replaced = size_of(whole, &inode);
        AT("rename", "before", to);
    }
    int result = (int)syscall(SYS_renameat2, old_folder, old, new_folder, new, flags);
    int error = errno;
    if (from && to && result == 0) {
        size_of(whole, &inode);
        note("rename", inode, replaced, to, from);
        AT("rename", "after", to);
    }
    errno = error;
    return result;
}

int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }

int renameat(int old_folder, const char *old, int new_folder, const char *new) {
    return renamed(old_folder, old, new_folder, new, 0);
}

int renameat2(int old_folder, const char *old, int new_folder, const char *new, unsigned flags) {
    return renamed(old_folder, old, new_folder, new, flags);
}

static int removed(int folder, const char *name, int flags) {
    char place[PATH_MAX];
    const char *path = below_at(folder, name, place);
    AT("unlink", "before", path);
    int result = (int)syscall(SYS_unlinkat, folder, name, flags);
    int error = errno;
    if (path && result == 0) note("unlink", 0, 0, path, NULL);
    if (result == 0) AT("unlink", "after", path);
    errno = error;
    return result;
}

int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int folder, const char *name, int flags) { return removed(folder, name, flags); }

static int made(int folder, const char *name, mode_t mode) {
    char place[PATH_MAX];
    const char *path = below_at(folder, name, place);
    AT("mkdir", "before", path);
    int result = (int)syscall(SYS_mkdirat, folder, name, mode);
    int error = errno;
    if (path && result == 0) note("mkdir", 0, 0, path, NULL);
    if (result == 0) AT("mkdir", "after", path);
    errno = error;
    return result;
}

int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return made(folder, name, mode); }
