"""Numbers of system calls, by architecture, and which of them a jailed process may make.

The numbers are part of the kernel's interface and never change. Those of aarch64 have not been tried on such a machine.
"""


def _table(text: str) -> dict[str, int]:
    return {name: int(number) for name, _, number in (item.partition("=") for item in text.split())}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": _table(
        """
memfd_create=319 fork=57 vfork=58 pidfd_open=434 landlock_restrict_self=446 landlock_create_ruleset=444
landlock_add_rule=445 setrlimit=160 statmount=457 listmount=458 open_tree_attr=467
_sysctl=156 access=21 acct=163 add_key=248 adjtimex=159 alarm=37 arch_prctl=158 bpf=321 brk=12 capget=125
chdir=80 chroot=161 clock_adjtime=305 clock_getres=229 clock_gettime=228 clock_nanosleep=230 clock_settime=227
clone=56 clone3=435 close=3 close_range=436 connect=42 copy_file_range=326 create_module=174 delete_module=176
dup=32 dup2=33 dup3=292 epoll_create=213 epoll_create1=291 epoll_ctl=233 epoll_pwait=281 epoll_pwait2=441
epoll_wait=232 eventfd=284 eventfd2=290 exit=60 exit_group=231 faccessat=269 faccessat2=439 fadvise64=221
fanotify_init=300 fanotify_mark=301 fchdir=81 fcntl=72 fdatasync=75 finit_module=313 flock=73 fsconfig=431
fsmount=432 fsopen=430 fspick=433 fstat=5 fstatfs=138 fsync=74 ftruncate=77 futex=202 futex_waitv=449
get_kernel_syms=177 get_robust_list=274 getcpu=309 getcwd=79 getdents=78 getdents64=217 getegid=108 geteuid=107
getgid=104 getgroups=115 getitimer=36 getpeername=52 getpgid=121 getpgrp=111 getpid=39 getppid=110
getpriority=140 getrandom=318 getresgid=120 getresuid=118 getrlimit=97 getrusage=98 getsid=124 getsockname=51
getsockopt=55 gettid=186 gettimeofday=96 getuid=102 init_module=175 io_uring_enter=426 io_uring_register=427
io_uring_setup=425 ioctl=16 ioperm=173 iopl=172 kcmp=312 kexec_file_load=320 kexec_load=246 keyctl=250 kill=62
lookup_dcookie=212 lseek=8 lstat=6 madvise=28 mbind=237 membarrier=324 migrate_pages=256 mincore=27 mlock=149
mmap=9 modify_ldt=154 mount=165 mount_setattr=442 move_mount=429 move_pages=279 mprotect=10 mremap=25 msync=26
munlock=150 munmap=11 name_to_handle_at=303 nanosleep=35 newfstatat=262 nfsservctl=180 open=2
open_by_handle_at=304 open_tree=428 openat=257 openat2=437 pause=34 perf_event_open=298 personality=135
pidfd_getfd=438 pipe=22 pipe2=293 pivot_root=155 poll=7 ppoll=271 prctl=157 pread64=17 preadv=295 prlimit64=302
process_madvise=440 process_vm_readv=310 process_vm_writev=311 pselect6=270 ptrace=101 pwrite64=18 pwritev=296
query_module=178 quotactl=179 quotactl_fd=443 read=0 readahead=187 readlink=89 readlinkat=267 readv=19
reboot=169 recvfrom=45 recvmsg=47 request_key=249 restart_syscall=219 rseq=334 rt_sigaction=13 rt_sigpending=127
rt_sigprocmask=14 rt_sigreturn=15 rt_sigsuspend=130 rt_sigtimedwait=128 sched_get_priority_max=146
sched_get_priority_min=147 sched_getaffinity=204 sched_getparam=143 sched_getscheduler=145 sched_yield=24
select=23 sendfile=40 sendmsg=46 sendto=44 set_mempolicy=238 set_mempolicy_home_node=450 set_robust_list=273
set_tid_address=218 setdomainname=171 sethostname=170 setitimer=38 setns=308 setsockopt=54 settimeofday=164
shutdown=48 sigaltstack=131 socket=41 socketpair=53 splice=275 stat=4 statfs=137 statx=332 swapoff=168
swapon=167 sync_file_range=277 sysfs=139 sysinfo=99 syslog=103 tee=276 tgkill=234 time=201 timerfd_create=283
timerfd_gettime=287 timerfd_settime=286 times=100 tkill=200 umask=95 umount2=166 uname=63 unshare=272 uselib=134
userfaultfd=323 ustat=136 vhangup=153 wait4=61 waitid=247 write=1 writev=20
"""
    ),
    "aarch64": _table(
        """
memfd_create=279 pidfd_open=434 landlock_restrict_self=446 landlock_create_ruleset=444 landlock_add_rule=445
setrlimit=164 statmount=457 listmount=458 open_tree_attr=467
acct=89 add_key=217 adjtimex=171 bpf=280 brk=214 capget=90 chdir=49 chroot=51 clock_adjtime=266 clock_getres=114
clock_gettime=113 clock_nanosleep=115 clock_settime=112 clone=220 clone3=435 close=57 close_range=436
connect=203 copy_file_range=285 delete_module=106 dup=23 dup3=24 epoll_create1=20 epoll_ctl=21 epoll_pwait=22
epoll_pwait2=441 eventfd2=19 exit=93 exit_group=94 faccessat=48 faccessat2=439 fadvise64=223 fanotify_init=262
fanotify_mark=263 fchdir=50 fcntl=25 fdatasync=83 finit_module=273 flock=32 fsconfig=431 fsmount=432 fsopen=430
fspick=433 fstat=80 fstatfs=44 fsync=82 ftruncate=46 futex=98 futex_waitv=449 get_robust_list=100 getcpu=168
getcwd=17 getdents64=61 getegid=177 geteuid=175 getgid=176 getgroups=158 getitimer=102 getpeername=205
getpgid=155 getpid=172 getppid=173 getpriority=141 getrandom=278 getresgid=150 getresuid=148 getrlimit=163
getrusage=165 getsid=156 getsockname=204 getsockopt=209 gettid=178 gettimeofday=169 getuid=174 init_module=105
io_uring_enter=426 io_uring_register=427 io_uring_setup=425 ioctl=29 kcmp=272 kexec_file_load=294 kexec_load=104
keyctl=219 kill=129 lookup_dcookie=18 lseek=62 madvise=233 mbind=235 membarrier=283 migrate_pages=238
mincore=232 mlock=228 mmap=222 mount=40 mount_setattr=442 move_mount=429 move_pages=239 mprotect=226 mremap=216
msync=227 munlock=229 munmap=215 nanosleep=101 newfstatat=79 nfsservctl=42 open_tree=428 openat=56 openat2=437
perf_event_open=241 personality=92 pidfd_getfd=438 pipe2=59 pivot_root=41 ppoll=73 prctl=167 pread64=67
preadv=69 prlimit64=261 process_madvise=440 process_vm_readv=270 process_vm_writev=271 pselect6=72 ptrace=117
pwrite64=68 pwritev=70 quotactl=60 quotactl_fd=443 read=63 readahead=213 readlinkat=78 readv=65 reboot=142
recvfrom=207 recvmsg=212 request_key=218 restart_syscall=128 rseq=293 rt_sigaction=134 rt_sigpending=136
rt_sigprocmask=135 rt_sigreturn=139 rt_sigsuspend=133 rt_sigtimedwait=137 sched_get_priority_max=125
sched_get_priority_min=126 sched_getaffinity=123 sched_getparam=121 sched_getscheduler=120 sched_yield=124
sendfile=71 sendmsg=211 sendto=206 set_mempolicy=237 set_mempolicy_home_node=450 set_robust_list=99
set_tid_address=96 setdomainname=162 sethostname=161 setitimer=103 setns=268 setsockopt=208 settimeofday=170
shutdown=210 sigaltstack=132 socket=198 socketpair=199 splice=76 statfs=43 statx=291 swapoff=225 swapon=224
sync_file_range=84 sysinfo=179 syslog=116 tee=77 tgkill=131 timerfd_create=85 timerfd_gettime=87
timerfd_settime=86 times=153 tkill=130 umask=166 umount2=39 uname=160 unshare=97 userfaultfd=282 vhangup=58
wait4=260 waitid=95 write=64 writev=66
"""
    ),
}

# What a Python program needs that computes, reads its installation, has threads and waits. Nothing else is possible:
# no new process, no execve, no socket but a pair, no signal to another process, nothing that writes to a file system.
PROGRAM_MAY = _names(
    """
access alarm arch_prctl brk capget chdir clock_getres clock_gettime clock_nanosleep close close_range
copy_file_range dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd
eventfd2 exit exit_group faccessat faccessat2 fadvise64 fchdir fdatasync fstat fstatfs fsync ftruncate futex
futex_waitv getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid
getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname
getsockopt gettid gettimeofday getuid lseek lstat madvise membarrier mincore mlock mmap mprotect mremap msync
munlock munmap nanosleep newfstatat open openat openat2 pause pipe pipe2 poll ppoll pread64 preadv pselect6
pwrite64 pwritev read readahead readlink readlinkat readv recvfrom recvmsg restart_syscall rseq rt_sigaction
rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler sched_yield select sendfile sendmsg
sendto set_robust_list set_tid_address setitimer setsockopt shutdown sigaltstack splice stat statfs statx
sync_file_range sysinfo tee time timerfd_create timerfd_gettime timerfd_settime times umask uname wait4 waitid
write writev
"""
)

# What a zygote needs besides; programs may do some of it to themselves only.
ZYGOTE_MAY = _names(
    """
clone fork vfork kill tgkill prlimit64 setrlimit prctl fcntl memfd_create pidfd_open landlock_restrict_self
"""
)

# What no verifier needs, and what has let processes out of jails before.
VERIFIER_MAY_NOT = _names(
    """
_sysctl acct add_key adjtimex bpf chroot clock_adjtime clock_settime create_module delete_module fanotify_init
fanotify_mark finit_module fsconfig fsmount fsopen fspick get_kernel_syms init_module io_uring_enter
io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl listmount lookup_dcookie
mbind migrate_pages modify_ldt mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl
open_by_handle_at open_tree open_tree_attr perf_event_open personality pidfd_getfd pivot_root process_madvise
process_vm_readv process_vm_writev ptrace query_module quotactl quotactl_fd reboot request_key set_mempolicy
set_mempolicy_home_node setdomainname sethostname setns settimeofday statmount swapoff swapon sysfs syslog
umount2 unshare uselib userfaultfd ustat vhangup vm86
"""
)
