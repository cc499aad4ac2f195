/* A library that cannot be loaded: its constructor calls what nobody has. */
void not_there(void);

__attribute__((constructor)) static void begin(void) { not_there(); }
