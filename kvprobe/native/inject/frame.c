/* How a borrowed thread finds back by itself: below what its stack holds lies the frame of a signal handler that was
 * never called, and whatever the thread is made to run returns into the end of a handler (rt_sigreturn). The kernel
 * then restores all registers and the signal mask from the frame, with or without an injector.
 *
 * Memory below the red zone is anybody's: a signal would be written there as well. */
#define _GNU_SOURCE
#include "inject.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <signal.h>
#include <string.h>
#include <ucontext.h>

enum { XSTATE_MAGIC1 = 0x46505853, XSTATE_MAGIC2 = 0x46505845 };
enum { FEATURES_AT = 464, USED_AT = 512, HEADER_END = 576 }; /* in an image of XSAVE */
#define TILES (UINT64_C(3) << 17)     /* AMX, which a program has to ask for: its space is there where it is used */
enum { FP_XSTATE = 1, SEGMENTS = 6 }; /* uc_flags: vector registers; cs and ss are restored as they are here */

struct kernel_frame {
    uint64_t returns_to;
    struct {
        uint64_t flags, link;
        stack_t stack;
        uint64_t registers[23], fpstate, reserved[8], mask;
    } context;
    uint64_t scratch[2];
};

struct xstate_marks { /* the last 48 bytes of the old FXSAVE area */
    uint32_t magic1, extended_bytes;
    uint64_t features;
    uint32_t bytes, unused[7];
};

struct user_regs_struct kvp_resting(const struct user_regs_struct *was) {
    struct user_regs_struct r = *was;
    if (kvp_waits(was)) {
        r.rip -= 2; /* `syscall` */
        r.rax = was->orig_rax;
    }
    r.orig_rax = (unsigned long long)-1;
    return r;
}

/* Bytes of the image that this process may hand to the kernel. */
static uint32_t image_bytes(uint64_t features) {
    uint32_t end = HEADER_END;
    for (unsigned i = 2; i < 63; i++) {
        unsigned bytes = 0, at = 0, c, d;
        if (features >> i & 1 && __get_cpuid_count(0xd, i, &bytes, &at, &c, &d) && at + bytes > end) end = at + bytes;
    }
    return end;
}

static void fill_registers(struct kernel_frame *f, const struct user_regs_struct *r) {
    uint64_t *to = f->context.registers;
    to[REG_R8] = r->r8, to[REG_R9] = r->r9, to[REG_R10] = r->r10, to[REG_R11] = r->r11;
    to[REG_R12] = r->r12, to[REG_R13] = r->r13, to[REG_R14] = r->r14, to[REG_R15] = r->r15;
    to[REG_RDI] = r->rdi, to[REG_RSI] = r->rsi, to[REG_RBP] = r->rbp, to[REG_RBX] = r->rbx;
    to[REG_RDX] = r->rdx, to[REG_RAX] = r->rax, to[REG_RCX] = r->rcx, to[REG_RSP] = r->rsp;
    to[REG_RIP] = r->rip, to[REG_EFL] = r->eflags;
    to[REG_CSGSFS] = r->cs | r->gs << 16 | r->fs << 32 | r->ss << 48;
}

int kvp_frame_write(struct borrowed *b) {
    static uint8_t buffer[FRAME_BYTES];
    struct user_regs_struct resting = kvp_resting(&b->was);
    struct xstate_marks marks = {0};
    uint64_t used;
    if (b->xstate_bytes < HEADER_END || b->xstate_bytes + 4 > XSTATE_BYTES) return 0;
    memcpy(&marks.features, b->xstate + FEATURES_AT, 8);
    memcpy(&used, b->xstate + USED_AT, 8);
    if (!(used & TILES)) marks.features &= ~TILES;
    marks.bytes = image_bytes(marks.features);
    if (marks.bytes > b->xstate_bytes) return 0;
    marks.extended_bytes = marks.bytes + 4;
    marks.magic1 = XSTATE_MAGIC1;

    uint64_t end = b->was.rsp - RED_ZONE, image = (end - marks.extended_bytes) & ~UINT64_C(63);
    uint64_t frame = ((image - sizeof(struct kernel_frame)) & ~UINT64_C(15)) - 8;
    struct kernel_frame f = {.returns_to = b->t->restore};
    f.context.flags = FP_XSTATE | SEGMENTS;
    f.context.stack.ss_flags = 7; /* no such flag: the kernel leaves the thread's own signal stack as it is */
    f.context.fpstate = image;
    f.context.mask = b->mask;
    fill_registers(&f, &resting);

    memset(buffer, 0, sizeof buffer);
    memcpy(buffer, &f, sizeof f);
    uint8_t *to = buffer + (image - frame);
    memcpy(to, b->xstate, marks.bytes);
    memcpy(to + FEATURES_AT, &marks, sizeof marks);
    uint32_t magic2 = XSTATE_MAGIC2;
    memcpy(to + marks.bytes, &magic2, sizeof magic2);
    b->frame = frame;
    b->scratch = frame + offsetof(struct kernel_frame, scratch);
    return kvp_target_write(b->t, frame, buffer, (size_t)(image - frame) + marks.extended_bytes);
}
#endif
