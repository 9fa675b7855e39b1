// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/common/torch_program.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

extern char** environ;

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;

std::vector<char*> argv_of(const std::vector<std::string>& words) {
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  return argv;
}

std::string path_beside(const char* name) {
  return (fs::path(own_path()).parent_path() / name).string();
}

}  // namespace

std::string own_path() { return fs::read_symlink("/proc/self/exe").string(); }

bool is_torch_program(const std::string& path) { return path == path_beside("lockstep-torch"); }

std::string torch_path() {
  const std::string path = path_beside("lockstep-torch");
  if (access(path.c_str(), X_OK) != 0)
    throw ConfigError(format("{} is missing: this build has no libtorch", path));
  return path;
}

int run_program(const std::vector<std::string>& words, StandardOutput output) {
  const auto argv = argv_of(words);
  pid_t pid = 0;
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  if (output == StandardOutput::discarded)
    posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  const int failure = posix_spawnp(&pid, argv[0], &files, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  if (failure != 0) {
    throw SystemError("cannot start " + words[0], failure);
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) throw SystemError("waitpid", errno);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void become_program(const std::vector<std::string>& words) {
  execvp(words[0].c_str(), argv_of(words).data());
  throw SystemError("cannot start " + words[0], errno);
}

}  // namespace lockstep::cli
