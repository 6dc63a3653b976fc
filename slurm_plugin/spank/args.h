/*
 * The plugin's arguments: what stands behind flashrecovery.so in plugstack.conf, as KEY=VALUE
 * words.
 *
 * One line serves the whole suite, so most keys are read by others (the limits of the pools, see
 * docs). Here they are only known. An unknown one is never an error that hurts: it is remembered,
 * and told to whoever can do something about it.
 */
#ifndef FLASHREC_ARGS_H
#define FLASHREC_ARGS_H

#include <stdbool.h>

struct flashrec_args {
	bool filter_sets_no_kill; /* no_kill=cli_filter: the site's cli_filter adds --no-kill */
	const char *executable;   /* flashrec=/path, or NULL: look in PATH */
	const char *wrong;        /* the first argument that is not one, or NULL */
};

/* Reads the arguments; the result points into `argv`, which Slurm keeps as long as the plugin. */
struct flashrec_args flashrec_args_read(int argc, char **argv);

#endif
