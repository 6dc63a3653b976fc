/*
 * A Slurm for unit tests: what it answers is set here, what it was told is found here. The plugin's
 * own objects run against it unchanged. exec, exit and the command line of the process are replaced
 * while linking (see the Makefile).
 */
#ifndef FLASHREC_FAKE_SPANK_H
#define FLASHREC_FAKE_SPANK_H

#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

enum { FAKE_MAX_VARIABLES = 16 };

struct fake_variables {
	int count;
	char name[FAKE_MAX_VARIABLES][64], value[FAKE_MAX_VARIABLES][1200];
};

struct fake {
	/* answers */
	spank_context_t context;
	spank_err_t register_rc;
	int missing_item; /* the spank_item that cannot be had, or -1 */
	uid_t uid;
	gid_t gid;
	uint32_t job, step, task;
	pid_t pid;
	int status;
	char **argv;     /* of the job step */
	char **cmdline;  /* of the process we are in; NULL: it cannot be read */
	int execv_errno; /* 0: it works */
	void (*before_fstat)(void);
	/* what happened */
	int num_registered;
	struct spank_option option;
	char said[4096];
	struct fake_variables job_env, kept;
	bool has_become;
	const char *became_path;
	char **became;
	sigset_t blocked;
	int exit_code; /* -1: it has not ended */
};

extern struct fake fake;

/* Forgets everything; the context is LOCAL and the command line `srun hostname`. */
void fake_reset(void);

/* The value of a variable; NULL if there is none. */
const char *fake_value(const struct fake_variables *variables, const char *name);

/*
 * Runs `call`; also returns when it has executed another program or ended the process. 0 if it has
 * returned by itself with 0.
 */
int fake_run(int (*call)(void));

int __wrap_execv(const char *path, char *const argv[]);
void __wrap__exit(int code) __attribute__((noreturn));
int __wrap_fstat(int fd, struct stat *found);
int __real_fstat(int fd, struct stat *found);

#endif
