// A process for what a process cannot undo: limits, users, file systems.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <string>

namespace lockstep::test {

// A copy of this process does the work. Returns what it says about a failure, or nothing.
inline std::string in_a_process(const std::function<std::string()>& work) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    std::string said;
    try {
      said = work();
    } catch (const std::exception& failure) {
      said = failure.what();
    }
    _exit(write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string said(4000, '\0');
  said.resize(static_cast<size_t>(std::max<ssize_t>(0, read(ends[0], said.data(), said.size()))));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? said : said + "; the process ended with " + std::to_string(status);
}

}  // namespace lockstep::test
