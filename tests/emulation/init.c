// PID 1 of the emulated machine: runs /payload with the arguments and environment in /job, passes
// on what it prints and how it ended, and powers off. /job: argc, arguments, environment, each
// NUL-terminated.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kJobBytes = 1 << 17, kMaxStrings = 4096 };
static char job[kJobBytes];
static char* arguments[kMaxStrings + 1];
static char* environment[kMaxStrings + 1];

static void mount_at(const char* type, const char* path) {
  mkdir(path, 0755);
  if (mount(type, path, type, 0, NULL)) perror(path);
}

static void read_job(void) {
  const int fd = open("/job", O_RDONLY);
  const ssize_t size = read(fd, job, sizeof job - 1);
  const int argument_count = atoi(job);
  int n = 0;
  for (char* p = job + strlen(job) + 1; p < job + size && n < kMaxStrings;
       p += strlen(p) + 1, ++n) {
    if (n < argument_count)
      arguments[n] = p;
    else
      environment[n - argument_count] = p;
  }
  close(fd);
}

// Bochs prints what arrives at this port: no serial line, no baud rate, nothing lost.
static void print(const char* text, size_t size) {
  for (size_t i = 0; i < size; ++i) outb(text[i], 0xE9);
}

static void power_off(void) {
  for (const char* p = "Shutdown"; *p; ++p) outb(*p, 0x8900);  // Bochs quits
  for (;;) pause();
}

static pid_t start_payload(int out) {
  const pid_t child = fork();
  if (child) return child;
  dup2(out, STDOUT_FILENO);
  dup2(out, STDERR_FILENO);
  execve("/payload", arguments, environment);
  perror("/payload");
  _exit(127);
}

int main(void) {
  mount_at("devtmpfs", "/dev");
  mount_at("proc", "/proc");
  mount_at("sysfs", "/sys");
  mkdir("/tmp", 01777);
  read_job();

  int ends[2];
  if (iopl(3) || pipe2(ends, O_CLOEXEC)) perror("init");
  char text[4096];
  print(text, sprintf(text, "[emulator: begin]\n"));
  const pid_t child = start_payload(ends[1]);
  close(ends[1]);
  for (ssize_t size; (size = read(ends[0], text, sizeof text)) > 0;) print(text, size);
  int status = 0;
  waitpid(child, &status, 0);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  print(text, sprintf(text, "[emulator: exit %d]\n", code));
  power_off();
}
