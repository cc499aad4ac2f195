/* The injector, which kills itself at a step of its own: what it holds has to find back without it.
 *
 *   dying_injector PID STEP LIBRARY FUNCTION UNDO FOLDER
 *
 * Prints the injector's answer, if there is one; without STEP's death it then says nothing more, which undoes it all. */
#include "inject.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

int kvp_inject(int pid, const struct kvp_injection *what, int connection);
static int deadly;

void kvp_inject_dies(int step) {
    if (step == deadly) kill(getpid(), SIGKILL);
}

int main(int argc, char **argv) {
    int pair[2], status;
    char answer[1024];
    if (argc < 7 || socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return 7;
    deadly = atoi(argv[2]);
    struct kvp_injection what = {.library = argv[3], .function = argv[4], .undo = argv[5], .folder = argv[6],
                                 .detail = "copies", .max_bytes = 1 << 30, .deadline_ms = 20000};
    pid_t injector = kvp_inject(atoi(argv[1]), &what, pair[1]);
    close(pair[1]);
    ssize_t bytes = read(pair[0], answer, sizeof answer);
    if (bytes > 0) fwrite(answer, 1, (size_t)bytes, stdout);
    close(pair[0]);
    return waitpid(injector, &status, 0) == injector && WIFSIGNALED(status) ? 0 : 3;
}
