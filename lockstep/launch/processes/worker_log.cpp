// SPDX-License-Identifier: Apache-2.0
#include "lockstep/launch/processes/worker_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::launch {
namespace {

// A line above this is cut: a program that writes that much without a line end does not write
// lines.
constexpr size_t kMaxLine = 64u << 20;

}  // namespace

WorkerLog::WorkerLog(Fd pipe, int rank, Console::Stream stream, Fd file)
    : pipe_(std::move(pipe)),
      file_(std::move(file)),
      prefix_(format("[rank{}]: ", rank)),
      stream_(stream) {}

bool WorkerLog::pump(Console& console) {
  std::array<char, 64u << 10> buffer;
  const ssize_t count = read(pipe_.get(), buffer.data(), buffer.size());
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (count <= 0) {
    finish(console);
    return false;
  }
  std::string_view bytes(buffer.data(), static_cast<size_t>(count));
  keep(bytes, console);
  std::string lines;
  for (size_t end = bytes.find('\n'); end != std::string_view::npos; end = bytes.find('\n')) {
    lines.append(prefix_).append(partial_).append(bytes.substr(0, end + 1));
    partial_.clear();
    bytes.remove_prefix(end + 1);
  }
  partial_.append(bytes);
  if (!lines.empty()) console.write(stream_, lines);
  if (partial_.size() > kMaxLine) finish(console);
  return true;
}

void WorkerLog::finish(Console& console) {
  if (!partial_.empty()) console.write(stream_, prefix_ + partial_ + "\n");
  partial_.clear();
}

void WorkerLog::keep(std::string_view bytes, Console& console) {
  while (file_.valid() && !bytes.empty()) {
    const ssize_t count = ::write(file_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      // A full disk must not end the job; the console still has everything.
      console.message(
          format("{}its log file is no longer written: {}", prefix_, std::strerror(errno)));
      file_ = Fd();
      return;
    }
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

std::string log_folder(const std::string& dir, int attempt, int rank) {
  return format("{}/attempt_{}/rank{}", dir, attempt, rank);
}

int free_attempt(const std::string& dir, int rank) {
  constexpr std::string_view kPrefix = "attempt_";
  int free = 0;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(dir, missing)) {
    const std::string name = entry.path().filename().string();
    int attempt = 0;
    if (!name.starts_with(kPrefix) ||
        std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), attempt).ec !=
            std::errc())
      continue;
    const std::string log = log_folder(dir, attempt, rank) + "/stdout.log";
    if (std::filesystem::is_regular_file(log, missing)) free = std::max(free, attempt + 1);
  }
  return free;
}

Fd open_log(const std::string& dir, int attempt, int rank, Console::Stream stream) {
  const std::string folder = log_folder(dir, attempt, rank);
  const std::string path =
      folder + (stream == Console::Stream::out ? "/stdout.log" : "/stderr.log");
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure) {
    throw ConfigError(format("--log-dir: cannot create {}: {}", folder, failure.message()));
  }
  Fd file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file.valid()) {
    throw ConfigError(format("--log-dir: cannot write {}: {}", path, std::strerror(errno)));
  }
  return file;
}

}  // namespace lockstep::launch
