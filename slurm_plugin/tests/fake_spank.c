#include "fake_spank.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmdline.h"

struct fake fake;

static jmp_buf end_of_process;

bool __wrap_flashrec_cmdline_read(struct flashrec_cmdline *line);

void fake_reset(void)
{
	static char srun[] = "srun", hostname[] = "hostname";
	static char *cmdline[] = {srun, hostname, NULL};

	memset(&fake, 0, sizeof(fake));
	fake.context = S_CTX_LOCAL;
	fake.missing_item = -1;
	fake.cmdline = cmdline;
	fake.exit_code = -1;
}

const char *fake_value(const struct fake_variables *variables, const char *name)
{
	for (int i = 0; i < variables->count; i++)
		if (strcmp(variables->name[i], name) == 0)
			return variables->value[i];
	return NULL;
}

static void set_value(struct fake_variables *variables, const char *name, const char *value)
{
	int i = 0;

	while (i < variables->count && strcmp(variables->name[i], name) != 0)
		i++;
	if (i == variables->count)
		variables->count++;
	snprintf(variables->name[i], sizeof(variables->name[i]), "%s", name);
	snprintf(variables->value[i], sizeof(variables->value[i]), "%s", value);
}

int fake_run(int (*call)(void))
{
	return setjmp(end_of_process) ? 0 : call();
}

/* ---- what is replaced while linking */

int __wrap_execv(const char *path, char *const argv[])
{
	if (fake.execv_errno) {
		errno = fake.execv_errno;
		return -1;
	}
	fake.has_become = true;
	fake.became_path = path;
	fake.became = (char **)argv;
	sigprocmask(SIG_SETMASK, NULL, &fake.blocked);
	longjmp(end_of_process, 1);
}

void __wrap__exit(int code)
{
	fake.exit_code = code;
	longjmp(end_of_process, 1);
}

int __wrap_fstat(int fd, struct stat *found)
{
	if (fake.before_fstat)
		fake.before_fstat();
	return __real_fstat(fd, found);
}

bool __wrap_flashrec_cmdline_read(struct flashrec_cmdline *line)
{
	size_t length = 1;
	char *at;

	if (!fake.cmdline) {
		errno = EACCES;
		return false;
	}
	for (line->argc = 0; fake.cmdline[line->argc]; line->argc++)
		length += strlen(fake.cmdline[line->argc]) + 1;
	line->argv = calloc((size_t)line->argc + 1, sizeof(line->argv[0]));
	at = malloc(length);
	for (int i = 0; i < line->argc; i++) {
		line->argv[i] = at;
		at = stpcpy(at, fake.cmdline[i]) + 1;
	}
	return true;
}

/* ---- SPANK */

spank_context_t spank_context(void)
{
	return fake.context;
}

spank_err_t spank_option_register(spank_t spank, struct spank_option *option)
{
	(void)spank;
	if (fake.register_rc == ESPANK_SUCCESS) {
		fake.option = *option;
		fake.num_registered++;
	}
	return fake.register_rc;
}

spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...)
{
	va_list out;

	(void)spank;
	if ((int)item == fake.missing_item)
		return ESPANK_NOT_AVAIL;
	va_start(out, item);
	switch (item) {
	case S_JOB_UID:
		*va_arg(out, uid_t *) = fake.uid;
		break;
	case S_JOB_GID:
		*va_arg(out, gid_t *) = fake.gid;
		break;
	case S_JOB_ID:
		*va_arg(out, uint32_t *) = fake.job;
		break;
	case S_JOB_STEPID:
		*va_arg(out, uint32_t *) = fake.step;
		break;
	case S_TASK_GLOBAL_ID:
		*va_arg(out, uint32_t *) = fake.task;
		break;
	case S_TASK_PID:
		*va_arg(out, pid_t *) = fake.pid;
		break;
	case S_TASK_EXIT_STATUS:
		*va_arg(out, int *) = fake.status;
		break;
	case S_JOB_ARGV: {
		int *argc = va_arg(out, int *);

		*va_arg(out, char ***) = fake.argv;
		for (*argc = 0; fake.argv && fake.argv[*argc];)
			++*argc;
		break;
	}
	default:
		va_end(out);
		return ESPANK_BAD_ARG;
	}
	va_end(out);
	return ESPANK_SUCCESS;
}

spank_err_t spank_getenv(spank_t spank, const char *name, char *value, int size)
{
	const char *found = fake_value(&fake.job_env, name);

	(void)spank;
	if (!found)
		return ESPANK_ENV_NOEXIST;
	snprintf(value, (size_t)size, "%s", found);
	return strlen(found) < (size_t)size ? ESPANK_SUCCESS : ESPANK_NOSPACE;
}

spank_err_t spank_setenv(spank_t spank, const char *name, const char *value, int overwrite)
{
	(void)spank;
	if (!overwrite && fake_value(&fake.job_env, name))
		return ESPANK_ENV_EXISTS;
	set_value(&fake.job_env, name, value);
	return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_setenv(spank_t spank, const char *name, const char *value,
				     int overwrite)
{
	(void)spank;
	(void)overwrite;
	set_value(&fake.kept, name, value);
	return ESPANK_SUCCESS;
}

static void say(const char *format, va_list words)
{
	size_t used = strlen(fake.said);

	vsnprintf(fake.said + used, sizeof(fake.said) - used, format, words);
	used = strlen(fake.said);
	snprintf(fake.said + used, sizeof(fake.said) - used, "\n");
}

void slurm_error(const char *format, ...)
{
	va_list words;

	va_start(words, format);
	say(format, words);
	va_end(words);
}

/* Only seen with srun -v. */
void slurm_verbose(const char *format, ...)
{
	(void)format;
}
