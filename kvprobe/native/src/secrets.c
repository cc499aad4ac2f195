/* Takes the secrets out of a command line, as kvprobe/runfolder/secrets.py says. */
#define _GNU_SOURCE
#include "secrets.h"

#include <string.h>
#include <strings.h>

static const char *const whole[] = {"key", "keys", "auth", "pwd", "cookie"};
static const char *const endings[] = {"token",      "secret",     "password",    "passwd",       "apikey",
                                      "passphrase", "credential", "credentials", "authorization"};
static const char *const prefixes[] = {"sk-", "hf_", "nvapi-", "ghp_", "gho_", "github_pat_", "xoxb-", "glpat-"};
#define EACH(text, list) for (const char *const *text = list; text < list + sizeof list / sizeof *list; text++)

struct span {
    const char *start;
    size_t size;
};

static int is(struct span s, const char *text) { return s.size == strlen(text) && !strncasecmp(s.start, text, s.size); }

static int ends(struct span s, const char *text) {
    size_t n = strlen(text);
    return s.size >= n && !strncasecmp(s.start + s.size - n, text, n);
}

/* Whether a name, of an option or a variable, is a secret's. */
static int secret(struct span name) {
    while (name.size && *name.start == '-') name.start++, name.size--;
    while (name.size) {
        size_t n = 0;
        while (n < name.size && !strchr("-_.", name.start[n])) n++;
        struct span part = {name.start, n};
        EACH(one, whole) if (is(part, *one)) return 1;
        EACH(one, endings) if (ends(part, *one)) return 1;
        n += n < name.size;
        name.start += n, name.size -= n;
    }
    return 0;
}

static struct span unquoted(struct span s) {
    while (s.size && (*s.start == '"' || *s.start == '\'')) s.start++, s.size--;
    while (s.size && (s.start[s.size - 1] == '"' || s.start[s.size - 1] == '\'')) s.size--;
    return s;
}

struct output {
    char *at, *end;
};

static void put(struct output *out, struct span s) {
    for (size_t i = 0; i < s.size && out->at < out->end; i++) *out->at++ = s.start[i];
}

/* One word. `hiding`: the words up to the next option belong to a secret. */
static void put_word(struct output *out, struct span word, int *hiding) {
    static const struct span stars = {"***", 3};
    struct span bare = unquoted(word);
    if (!bare.size) {
        put(out, word);
        return;
    }
    if (*hiding && *bare.start != '-') {
        put(out, stars);
        return;
    }
    *hiding = 0;
    const char *equals = memchr(bare.start, '=', bare.size);
    const char *scheme = memmem(bare.start, bare.size, "://", 3);
    struct span name = {bare.start, equals ? (size_t)(equals - bare.start) : bare.size};
    if (equals && secret(name)) {
        put(out, (struct span){bare.start, name.size + 1});
        put(out, stars);
        return;
    }
    if (scheme) {
        const char *from = scheme + 3, *end = bare.start + bare.size, *to = from;
        while (to < end && *to != '/') to++;
        const char *at = memrchr(from, '@', (size_t)(to - from));
        if (at) {
            put(out, (struct span){bare.start, (size_t)(from - bare.start)});
            put(out, stars);
            put(out, (struct span){at, (size_t)(end - at)});
            return;
        }
    }
    EACH(one, prefixes) if (bare.size >= 16 && !strncmp(bare.start, *one, strlen(*one))) {
        put(out, stars);
        return;
    }
    int colon = bare.start[bare.size - 1] == ':';
    struct span asked = bare;
    while (asked.size && asked.start[asked.size - 1] == ':') asked.size--;
    *hiding = ((colon || *bare.start == '-') && !equals && secret(asked)) || is(bare, "bearer");
    put(out, word);
}

void kvp_redact(const char *text, char *out, size_t size) {
    struct output to = {out, out + size - 1};
    int hiding = 0;
    for (;;) {
        size_t n = strcspn(text, " \t\n");
        put_word(&to, (struct span){text, n}, &hiding);
        text += n;
        if (!*text) break;
        put(&to, (struct span){" ", 1});
        text++;
    }
    *to.at = 0;
}
