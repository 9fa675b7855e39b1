// SPDX-License-Identifier: Apache-2.0
// A process for what a process cannot undo: limits, users, file systems, devices that it sees.
#pragma once

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::test {

inline std::string attempt(const std::function<std::string()>& work) {
  try {
    return work();
  } catch (const std::exception& failure) {
    return failure.what();
  }
}

// What the process says into the pipe, and how it ended unless it ended well.
inline std::string outcome_of(pid_t child, int pipe_end) {
  std::string said(4000, '\0');
  said.resize(static_cast<size_t>(std::max<ssize_t>(0, read(pipe_end, said.data(), said.size()))));
  close(pipe_end);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? said : said + "; the process ended with " + std::to_string(status);
}

// A copy of this process does the work. Returns what it says about a failure, or nothing.
inline std::string in_a_process(const std::function<std::string()>& work) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    const std::string said = attempt(work);
    _exit(write(ends[1], said.data(), said.size()) == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  close(ends[1]);
  return outcome_of(child, ends[0]);
}

// The same in a process that has just started and sees no GPU: CUDA does not survive a fork. The
// program is started again for this one test, which comes here again and then does the work.
inline std::string in_a_fresh_process(const std::function<std::string()>& work) {
  constexpr const char* kPipe = "LOCKSTEP_TEST_PIPE";
  if (const char* const pipe_end = std::getenv(kPipe)) {
    const std::string said = attempt(work);
    const ssize_t written = write(std::atoi(pipe_end), said.data(), said.size());
    _exit(written == static_cast<ssize_t>(said.size()) ? 0 : 1);
  }
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string filter =
      std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name();
  const std::string variable = std::string(kPipe) + "=" + std::to_string(ends[1]);
  std::vector<std::string> words{"/proc/self/exe", filter};
  std::vector<std::string> variables{variable, "CUDA_VISIBLE_DEVICES="};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (!text.starts_with("CUDA_VISIBLE_DEVICES=") && !text.starts_with("GTEST_"))
      variables.push_back(*entry);
  }
  const auto pointers = [](std::vector<std::string>& texts) {
    std::vector<char*> list;
    for (std::string& text : texts) list.push_back(text.data());
    list.push_back(nullptr);
    return list;
  };
  pid_t child = 0;
  const int failed = posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, pointers(words).data(),
                                 pointers(variables).data());
  close(ends[1]);
  if (failed != 0) return "no process";
  return outcome_of(child, ends[0]);
}

}  // namespace lockstep::test
