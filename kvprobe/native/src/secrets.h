/* Takes the secrets out of a command line. kvprobe/runfolder/secrets.py says the rules; a test holds both equal. */
#ifndef KVP_SECRETS_H
#define KVP_SECRETS_H

#include <stddef.h>

/* Writes `text` to `out`, cut to `size` with its NUL, each secret as ***. `bytes` of text are words with a NUL between
 * two, as in /proc/<pid>/cmdline; in `out` a space stands there. One word alone is taken for a whole command line. */
__attribute__((visibility("hidden"))) void kvp_redact(const char *text, size_t bytes, char *out, size_t size);

#endif
