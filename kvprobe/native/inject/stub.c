/* What runs in the process, on a thread that was made for it: it loads the library and calls the function. This code is
 * copied there, so it knows no address but those that it is handed, and calls nothing else.
 *
 * Whoever asked may be gone at any moment: the thread waits for an order for LET_GO_MS, and without one it undoes what
 * it did. At its end it takes away the memory that it lies in. */
#include "inject.h"

#include <dlfcn.h>
#include <sys/mman.h>

#define IN_PROCESS                                                                                                     \
    __attribute__((section("kvp_stub"), noinline, used, visibility("hidden"),                                          \
                   no_sanitize("address", "thread", "undefined")))

#if defined(__x86_64__)
/* The last jump: munmap's return goes to whoever called this. */
__asm__(".pushsection kvp_stub,\"ax\",@progbits\n"
        ".globl kvp_stub_entry\n"
        ".hidden kvp_stub_entry\n"
        "kvp_stub_entry:\n"
        "    push %rbx\n"
        "    mov %rdi, %rbx\n"
        "    call kvp_stub_work\n"
        "    mov 0(%rbx), %rax\n"
        "    mov 8(%rbx), %rdi\n"
        "    mov 16(%rbx), %rsi\n"
        "    pop %rbx\n"
        "    jmp *%rax\n"
        ".popsection\n");
#endif

/* Says how far it is and waits for an order of at least this rank; UNDO where nobody gives one. */
IN_PROCESS uint32_t kvp_stub_await(struct injected *in, uint32_t state, uint32_t order) {
    in->state = state;
    uint32_t beat = in->beat, alone_ms = 0;
    while (in->order < order) {
        alone_ms += STUB_PAUSE_MS;
        if (in->beat != beat) {
            beat = in->beat;
            alone_ms = 0;
        }
        if (alone_ms > LET_GO_MS) return UNDO;
        in->nanosleep(&in->pause, 0);
    }
    return in->order;
}

IN_PROCESS void kvp_stub_fail(struct injected *in) {
    const volatile char *said = in->dlerror();
    for (unsigned i = 0; said && said[i] && i + 1 < sizeof in->error; i++) in->error[i] = said[i];
    kvp_stub_await(in, FAILED, GO_ON);
}

IN_PROCESS void kvp_stub_work(struct injected *in) {
    char *data = (char *)in;
    in->mprotect(data, in->bytes - CODE_BYTES, PROT_READ | PROT_WRITE);
    in->madvise(in->base, in->bytes, MADV_DONTFORK);
    in->pthread_detach(in->pthread_self());
    void *handle = in->dlopen(in->library, RTLD_NOW);
    if (!handle) {
        kvp_stub_fail(in);
        return;
    }
    int (*function)(const char *, const char *, const char *, uint64_t) =
        (int (*)(const char *, const char *, const char *, uint64_t))in->dlsym(handle, in->function);
    int (*undo)(void) = in->undo[0] ? (int (*)(void))in->dlsym(handle, in->undo) : 0;
    if (!function || (in->undo[0] && !undo)) {
        kvp_stub_fail(in);
    } else if (kvp_stub_await(in, LOADED, GO_ON) != UNDO) {
        /* from here on other threads may be inside the library: it stays */
        in->dlopen(in->library, RTLD_NOW | RTLD_NODELETE);
        in->result = function(in->library, in->folder, in->detail, in->max_bytes);
        if (kvp_stub_await(in, DONE, LEAVE_IT) == UNDO && undo && in->result >= 0) undo();
    }
    in->dlclose(handle);
}
