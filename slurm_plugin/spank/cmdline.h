/*
 * The command line of the process we are in: SPANK shows it to no plugin in srun, sbatch and
 * salloc, the kernel does.
 */
#ifndef FLASHREC_CMDLINE_H
#define FLASHREC_CMDLINE_H

#include <stdbool.h>
#include <stddef.h>

struct flashrec_cmdline {
	int argc;
	char **argv; /* ends with NULL; its words are in one block of memory, at argv[0] */
};

/* Reads it, as typed. False (with nothing to free) if it cannot be read. */
bool flashrec_cmdline_read(struct flashrec_cmdline *line);

void flashrec_cmdline_free(struct flashrec_cmdline *line);

/*
 * The first `count` words with a space between them, in memory that the caller frees; NULL if that
 * is longer than `max` bytes or there is no memory.
 */
char *flashrec_cmdline_join(const struct flashrec_cmdline *line, int count, size_t max);

#endif
