// SPDX-License-Identifier: Apache-2.0
#include "tests/support/subprocess.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "lockstep/core/error.h"

namespace lockstep::test {
namespace {

constexpr const char* kMarkName = "LOCKSTEP_TEST_MARK";

std::string contents(const Fd& file) {
  std::string text(static_cast<size_t>(lseek(file.get(), 0, SEEK_END)), '\0');
  const ssize_t count = pread(file.get(), text.data(), text.size(), 0);
  text.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return text;
}

// O_APPEND: what several processes write to one stream does not overwrite itself.
Fd memory_file() {
  Fd file(memfd_create("output", MFD_CLOEXEC));
  if (!file.valid() || fcntl(file.get(), F_SETFL, O_APPEND) != 0) throw SystemError("memfd", errno);
  return file;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> environment_with(const std::vector<std::string>& variables) {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const std::string name = text.substr(0, text.find('='));
    bool replaced = false;
    for (const std::string& variable : variables) {
      replaced = replaced || variable.substr(0, variable.find('=')) == name;
    }
    if (!replaced) entries.push_back(text);
  }
  for (const std::string& variable : variables) {
    if (variable.find('=') != std::string::npos) entries.push_back(variable);
  }
  return entries;
}

}  // namespace

bool eventually(const std::function<bool()>& condition, milliseconds limit) {
  const Deadline deadline(limit);
  while (!condition()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(milliseconds{5});
  }
  return true;
}

std::string Result::last_line() const {
  std::string text = err;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text.substr(text.rfind('\n') + 1);
}

Subprocess::Subprocess(const std::vector<std::string>& argv,
                       const std::vector<std::string>& variables, const std::string& in)
    : in_(memfd_create("input", MFD_CLOEXEC)), out_(memory_file()), err_(memory_file()) {
  static std::atomic<int> serial{0};
  mark_ = std::string(kMarkName) + "=" + std::to_string(getpid()) + "." + std::to_string(++serial);
  std::vector<std::string> all = variables;
  all.push_back(mark_);
  // In a build with sanitizers: the search for leaks takes seconds at each exit.
  all.emplace_back("ASAN_OPTIONS=detect_leaks=0");
  // Whatever started the tests may have set these for itself.
  for (const char* name : {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LOCKSTEP_TOKEN"}) {
    bool given = false;
    for (const std::string& variable : variables) given = given || variable.starts_with(name);
    if (!given) all.emplace_back(name);
  }
  const auto environment = environment_with(all);
  write_full(in_, std::as_bytes(std::span(in)), Deadline(kDefaultTimeout));
  lseek(in_.get(), 0, SEEK_SET);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in_.get(), 0);
  posix_spawn_file_actions_adddup2(&actions, out_.get(), 1);
  posix_spawn_file_actions_adddup2(&actions, err_.get(), 2);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t every, none;
  sigfillset(&every);
  sigemptyset(&none);
  posix_spawnattr_setsigdefault(&attributes, &every);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
  start_ = Clock::now();
  const int failure = posix_spawnp(&pid_, argv[0].c_str(), &actions, &attributes,
                                   pointers(argv).data(), pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (failure != 0) throw SystemError("posix_spawn " + argv[0], failure);
}

Subprocess::~Subprocess() {
  for (const pid_t pid : others()) ::kill(pid, SIGKILL);
  if (reaped_) return;
  kill(SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void Subprocess::kill(int signal) const {
  if (!reaped_) ::kill(pid_, signal);
}
std::string Subprocess::out() const { return contents(out_); }
std::string Subprocess::err() const { return contents(err_); }

Result Subprocess::wait(milliseconds limit) {
  const Fd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  pollfd item{pidfd.get(), POLLIN, 0};
  if (poll(&item, 1, static_cast<int>(limit.count())) <= 0) {
    ADD_FAILURE() << "still running after " << limit.count() << " ms; stderr:\n" << err();
    kill(SIGKILL);
  }
  int status = 0;
  waitpid(pid_, &status, 0);
  reaped_ = true;
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return {code, out(), err(), seconds_since(start_)};
}

std::vector<pid_t> Subprocess::others() const {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const pid_t pid = std::stoi(name);
    // A zombie's environment reads as empty, so it does not count.
    const bool marked =
        ('\0' + read_file("/proc/" + name + "/environ")).find('\0' + mark_ + '\0') !=
        std::string::npos;
    if (marked && pid != pid_) found.push_back(pid);
  }
  return found;
}

Result lockstep_command(const std::vector<std::string>& arguments,
                        const std::vector<std::string>& variables, const std::string& in) {
  std::vector<std::string> argv = {LOCKSTEP_COMMAND};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return Subprocess(argv, variables, in).wait();
}

std::vector<std::string> run_script(int ranks, const std::string& script,
                                    const std::vector<std::string>& options) {
  std::vector<std::string> argv = {LOCKSTEP_COMMAND, "run", "-n", std::to_string(ranks)};
  argv.insert(argv.end(), options.begin(), options.end());
  argv.insert(argv.end(), {"sh", "-c", script});
  return argv;
}

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "lockstep-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw SystemError("mkdtemp", errno);
  path_ = pattern;
}
TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string this_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write_file(const std::string& path, const std::string& text, int mode) {
  std::ofstream(path, std::ios::binary) << text;
  chmod(path.c_str(), static_cast<mode_t>(mode));
}

}  // namespace lockstep::test
