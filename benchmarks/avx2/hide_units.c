/* Preloaded into a process, it makes the CPU look as one without AVX512, VNNI and AMX.
 *
 * Environment variables hold torch's libraries alone to a lower instruction set. Here the
 * instruction CPUID itself faults (Linux' ARCH_CPUID, CPUs with `cpuid_fault`), and the fault's
 * handler answers with the units' bits taken out, so that every library of the process, of
 * those that it starts and of those that they load chooses its kernels for such a CPU. The C
 * library has chosen its own before this one is loaded, and /proc/cpuinfo stays as it is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_CPUID 0x1012
#define CPUID_LENGTH 2

static struct sigaction theirs; /* What the process has asked to be done about faults. */
static int at_work;

static long cpuid_answers(int allowed) { return syscall(SYS_arch_prctl, ARCH_CPUID, allowed); }

static unsigned bits(const int *places, int number) {
    unsigned found = 0;
    for (int i = 0; i < number; i++) found |= 1u << places[i];
    return found;
}
#define BITS(...) bits((const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int))

static void answer(greg_t *registers) {
    unsigned leaf = registers[REG_RAX], part = registers[REG_RCX];
    unsigned a, b, c, d;
    cpuid_answers(1);
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(part));
    cpuid_answers(0);
    if (leaf == 7 && part == 0) {
        b &= ~BITS(16, 17, 21, 26, 27, 28, 30, 31);   /* F DQ IFMA PF ER CD BW VL */
        c &= ~BITS(1, 6, 11, 12, 14);                 /* VBMI VBMI2 VNNI BITALG VPOPCNTDQ */
        d &= ~BITS(2, 3, 8, 22, 23, 24, 25);          /* 4VNNIW 4FMAPS VP2INTERSECT, AMX, FP16 */
    } else if (leaf == 7 && part == 1) {
        a &= ~BITS(4, 5, 21, 23);                     /* AVX-VNNI, AVX512-BF16, AMX-FP16, IFMA */
        d &= ~BITS(4, 5, 8, 10, 19);                  /* VNNI-INT8, NE-CONVERT, AMX, INT16, AVX10 */
    } else if (leaf == 0xd && part == 0) {
        a &= ~BITS(5, 6, 7, 17, 18);                  /* States of AVX512 and AMX */
    } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {
        a = b = c = d = 0;                            /* AMX' tiles, AVX10 */
    }
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += CPUID_LENGTH;
}

static int real_sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    static int (*real)(int, const struct sigaction *, struct sigaction *);
    if (!real) real = dlsym(RTLD_NEXT, "sigaction");
    return real(number, new, old);
}

static void on_fault(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    /* A general protection fault has no address; only then are there bytes to read at RIP. */
    if (info->si_code == SI_KERNEL && !memcmp((void *)registers[REG_RIP], "\x0f\xa2", 2)) {
        int before = errno;
        answer(registers);
        errno = before;
    } else if (theirs.sa_flags & SA_SIGINFO) {
        theirs.sa_sigaction(number, info, context);
    } else if (theirs.sa_handler != SIG_DFL && theirs.sa_handler != SIG_IGN) {
        theirs.sa_handler(number);
    } else {
        struct sigaction plain = {.sa_handler = SIG_DFL};
        real_sigaction(SIGSEGV, &plain, NULL);
        raise(number);
    }
}

/* Handlers of others for SIGSEGV (Python's faulthandler, Ray's) are kept and called by ours. */
int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    if (number != SIGSEGV || !at_work) return real_sigaction(number, new, old);
    struct sigaction before = theirs;
    if (new) theirs = *new;
    if (old) *old = before;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction new = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    return sigaction(number, &new, &old) ? SIG_ERR : old.sa_handler;
}

/* A fault while SIGSEGV is blocked kills the process: it never is. */
static const sigset_t *without_fault(int how, const sigset_t *set, sigset_t *room) {
    if (!set || how == SIG_UNBLOCK) return set;
    *room = *set;
    sigdelset(room, SIGSEGV);
    return room;
}

#define UNBLOCKED(name)                                                          \
    int name(int how, const sigset_t *set, sigset_t *old) {                      \
        static int (*real)(int, const sigset_t *, sigset_t *);                   \
        sigset_t room;                                                           \
        if (!real) real = dlsym(RTLD_NEXT, #name);                               \
        return real(how, without_fault(how, set, &room), old);                   \
    }
UNBLOCKED(sigprocmask)
UNBLOCKED(pthread_sigmask)

__attribute__((constructor)) static void begin(void) {
    struct sigaction ours = {.sa_sigaction = on_fault,
                             .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
    sigset_t fault;
    real_sigaction(SIGSEGV, &ours, &theirs);
    sigemptyset(&fault);
    sigaddset(&fault, SIGSEGV);
    sigprocmask(SIG_UNBLOCK, &fault, NULL);
    at_work = cpuid_answers(0) == 0;
    if (!at_work) { /* Figures with the units must not pass for those without. */
        static const char told[] = "hide_units: the kernel refuses ARCH_CPUID, nothing is hidden\n";
        ssize_t written = write(2, told, sizeof told - 1);
        (void)written;
        _exit(126);
    }
}
