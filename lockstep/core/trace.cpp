// SPDX-License-Identifier: Apache-2.0
// Process-wide state, because a trace file is one per process. Events are formatted into a buffer
// that goes to the file when it is large or the process exits. The array is closed after each
// write, and the next one overwrites the bracket: a killed process leaves complete JSON too.
#include "lockstep/core/trace.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>
#include <random>

#include "lockstep/core/format.h"
#include "lockstep/core/log.h"

namespace lockstep::trace {
namespace {

class File {
 public:
  explicit File(std::string folder) : folder_(std::move(folder)) {
    std::atexit(trace::flush);
    std::at_quick_exit(trace::flush);
  }

  void begin(uint64_t run, const std::string& process) {
    const std::lock_guard lock(mutex_);
    if (!process_.empty()) return;
    run_ = run;
    process_ = process;
    open();
  }
  void write_to(const std::string& folder) {
    const std::lock_guard lock(mutex_);
    if (folder_.empty()) folder_ = folder;
    if (!process_.empty()) open();
  }
  void add(const std::string& event) {
    const std::lock_guard lock(mutex_);
    if (failed_) return;
    buffer_ += event;
    if (buffer_.size() > (1u << 20)) write();
  }
  void flush() {
    const std::lock_guard lock(mutex_);
    write();
  }

 private:
  void open() {
    if (file_ != nullptr || failed_ || folder_.empty()) return;
    std::error_code failure;
    std::filesystem::create_directories(folder_, failure);
    const std::string path = format("{}/run{:016x}-{}.json", folder_, run_, process_);
    file_ = std::fopen(path.c_str(), "w");
    if (file_ == nullptr) {
      failed_ = true;
      buffer_.clear();
      log::warn(format("LOCKSTEP_TRACE: cannot write {}; no trace is kept", path));
      return;
    }
    std::fputs("[\n]\n", file_);
  }

  // Each event in the buffer ends in a comma and a line end.
  void write() {
    if (buffer_.empty() || folder_.empty()) return;
    if (process_.empty()) {
      run_ = own_run();
      process_ = format("pid{}", getpid());
    }
    open();
    if (failed_) return;
    buffer_.resize(buffer_.size() - 2);
    std::fseek(file_, has_events_ ? -3 : -2, SEEK_END);
    if (has_events_) std::fputs(",\n", file_);
    std::fwrite(buffer_.data(), 1, buffer_.size(), file_);
    std::fputs("\n]\n", file_);
    std::fflush(file_);
    buffer_.clear();
    has_events_ = true;
  }

  // Of a process that is in no run of several: no other one has it.
  static uint64_t own_run() {
    std::random_device random;
    return (uint64_t{random()} << 32) | random();
  }

  std::string folder_;  // empty: not known yet
  std::mutex mutex_;
  uint64_t run_ = 0;
  std::string process_;  // empty until begin(), or the first write
  std::string buffer_;
  std::FILE* file_ = nullptr;  // opened when the run is known, or by the first write
  bool failed_ = false;        // to open it
  bool has_events_ = false;
};

std::atomic<bool> folder_expected{false};

// Null when tracing is off. Leaked on purpose: threads may end spans while the process exits.
File* file() {
  static File* const instance = []() -> File* {
    const char* folder = std::getenv("LOCKSTEP_TRACE");
    const bool named = folder != nullptr && *folder != '\0';
    return named || folder_expected ? new File(named ? folder : "") : nullptr;
  }();
  return instance;
}

std::optional<Row>& thread_row() {
  thread_local std::optional<Row> row;
  return row;
}

// What turns times of this host's monotonic clock into those of the wall clock, in microseconds.
int64_t wall_offset() {
  using std::chrono::duration_cast, std::chrono::microseconds;
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  return duration_cast<microseconds>(wall).count() -
         duration_cast<microseconds>(Clock::now().time_since_epoch()).count();
}

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

}  // namespace

bool enabled() { return file() != nullptr; }

void begin_run(uint64_t run, int rank) {
  if (enabled()) file()->begin(run, format("rank{}", rank));
}

void expect_folder() { folder_expected = true; }

void write_to(const std::string& folder) {
  if (enabled()) file()->write_to(folder);
}

Row::Row(int rank, std::string_view name) : rank_(rank) {
  static std::atomic<int> next_id{1};
  id_ = next_id++;
  if (!enabled()) return;
  file()->add(format(
      "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{0},\"args\":{{\"name\":\"rank "
      "{0}\",\"wall_offset_us\":{3}}}}},\n"
      "{{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":{0},\"args\":{{\"sort_index\":{0}}}}}"
      ",\n"
      "{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{0},\"tid\":{1},\"args\":{{\"name\":\"{2}\"}"
      "}}},\n",
      rank_, id_, name, wall_offset()));
}

void Row::add(std::string_view category, std::string_view name, Clock::time_point start,
              Clock::time_point end, std::string_view args) const {
  if (!enabled()) return;
  file()->add(
      format("{{\"ph\":\"X\",\"cat\":\"{}\",\"name\":\"{}\",\"pid\":{},\"tid\":{},\"ts\":{:.3f},"
             "\"dur\":{:.3f},\"args\":{{{}}}}},\n",
             category, name, rank_, id_, microseconds(start.time_since_epoch()),
             microseconds(end - start), args));
}

void name_thread(int rank, std::string_view name) {
  if (enabled()) thread_row().emplace(rank, name);
}

Span::Span(std::string_view category, std::string_view name, std::string args)
    : active_(enabled()) {
  if (!active_) return;
  category_ = category;
  name_ = name;
  args_ = std::move(args);
  start_ = Clock::now();
}

Span::~Span() {
  if (!active_) return;
  const auto end = Clock::now();
  if (!thread_row()) {
    const char* rank = std::getenv("RANK");
    name_thread(rank != nullptr ? std::atoi(rank) : 0, "thread");
  }
  thread_row()->add(category_, name_, start_, end, args_);
}

void flush() {
  if (enabled()) file()->flush();
}

}  // namespace lockstep::trace
