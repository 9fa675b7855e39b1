// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <sstream>
#include <utility>

#include "lockstep/core/clock.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/core/rank_env.h"
#include "lockstep/io/durable.h"

namespace lockstep::io {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostRecord = 4096;
constexpr std::chrono::seconds kBeat{5};
// A process that was killed holds its lock until the system has cleared it away, and a command that
// only looks holds it for a moment.
constexpr milliseconds kPatience{600}, kPause{20};

// The first bytes of a small file of the system, without the line feed at its end.
std::string short_text(const std::string& path) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text(kMostRecord, '\0');
  const ssize_t count = fd.valid() ? read(fd.get(), text.data(), text.size()) : 0;
  text.resize(count > 0 ? static_cast<size_t>(count) : 0);
  while (text.ends_with('\n')) text.pop_back();
  return text;
}

// Field 22 of /proc/PID/stat; 0 where there is no such process. The name in front of it may hold
// spaces and brackets.
int64_t start_of(int64_t pid) {
  const std::string text = short_text(format("/proc/{}/stat", pid));
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  return std::atoll(field.c_str());
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

std::string job_name() {
  for (const char* name : {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"}) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') return value;
  }
  return "none";
}

// One word, for a file of words.
std::string word(std::string text) {
  for (char& c : text) {
    if (c <= ' ' || c > '~') c = '_';
  }
  return text.empty() ? "unknown" : text.substr(0, 256);
}

std::string text_of(const Fd& fd) {
  std::string text(kMostRecord, '\0');
  const ssize_t count = pread(fd.get(), text.data(), text.size(), 0);
  text.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return text;
}

// Whether the name still leads to the open file.
bool is_at(const Fd& fd, const std::string& path) {
  struct stat open_file {};
  struct stat named {};
  return fstat(fd.get(), &open_file) == 0 && lstat(path.c_str(), &named) == 0 &&
         open_file.st_dev == named.st_dev && open_file.st_ino == named.st_ino;
}

// By the clock of the file system, which writes the times.
double age_in_seconds(const Fd& fd, const std::string& dir) {
  struct stat before {};
  if (fstat(fd.get(), &before) != 0) return 0;
  const auto probe = format("{}/.lock-time-{}", dir, getpid());
  const Fd fresh(open(probe.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  struct stat now {};
  const bool known = fresh.valid() && futimens(fresh.get(), nullptr) == 0 &&
                     fstat(fresh.get(), &now) == 0 && unlink(probe.c_str()) == 0;
  if (!known) return 0;
  return static_cast<double>(now.st_mtim.tv_sec - before.st_mtim.tv_sec) +
         1e-9 * static_cast<double>(now.st_mtim.tv_nsec - before.st_mtim.tv_nsec);
}

[[noreturn]] void refuse(const std::string& dir, const std::string& text, const std::string& more) {
  const auto owner = LockOwner::parse(text);
  throw ConfigError(
      format("checkpoint folder {} is in use by {}{}; wait for its end, or choose another "
             "folder (checkpoint.dir)",
             dir, owner ? owner->describe() : "another process", more));
}

enum class Taken { yes, no, moved };

// The kernel's lock on the open file. A file system without such locks leaves what the text says.
Taken take(const Fd& fd, const std::string& path) {
  if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK || errno == EINTR) return Taken::no;
    const auto owner = LockOwner::parse(text_of(fd));
    const LockOwner self = LockOwner::self();
    const bool here = owner && owner->boot == self.boot && owner->space == self.space;
    if (here && start_of(owner->pid) == owner->start) return Taken::no;
  }
  return is_at(fd, path) ? Taken::yes : Taken::moved;
}

// Throws where the text is of an owner on another host who may live.
void require_dead(const Fd& fd, const std::string& dir) {
  const std::string text = text_of(fd);
  const auto owner = LockOwner::parse(text);
  if (!owner || owner->boot == LockOwner::self().boot) return;
  const double age = age_in_seconds(fd, dir);
  const auto lease = static_cast<double>(FolderLock::kLease.count());
  if (age > lease) return;
  refuse(dir, text,
         format(", which was alive {:.0f} seconds ago; its lock ends {} seconds after its last "
                "sign of life",
                age, FolderLock::kLease.count()));
}

}  // namespace

LockOwner LockOwner::self() {
  std::error_code error;
  return {.generation = 1,
          .host = word(host_name()),
          .boot = word(short_text("/proc/sys/kernel/random/boot_id")),
          .space = word(fs::read_symlink("/proc/self/ns/pid", error).string()),
          .pid = getpid(),
          .start = start_of(getpid()),
          .job = word(job_name()),
          .since = utc_now()};
}

std::string LockOwner::text() const {
  return format(
      "lockstep.lock 1\ngeneration {}\nhost {}\nboot {}\nspace {}\npid {}\nstart {}\njob "
      "{}\nsince {}\n",
      generation, host, boot, space, pid, start, job, since);
}

std::optional<LockOwner> LockOwner::parse(const std::string& text) {
  LockOwner owner;
  std::istringstream words(text);
  std::string head, version;
  words >> head >> version;
  const auto read = [&](const char* name, auto& value) {
    std::string key;
    return (words >> key >> value) && key == name;
  };
  if (head != "lockstep.lock" || version != "1" || !read("generation", owner.generation) ||
      !read("host", owner.host) || !read("boot", owner.boot) || !read("space", owner.space) ||
      !read("pid", owner.pid) || !read("start", owner.start) || !read("job", owner.job) ||
      !read("since", owner.since)) {
    return std::nullopt;
  }
  return owner;
}

std::string LockOwner::describe() const {
  return format("pid {} on host {} (job {}, since {})", pid, host, job, since);
}

FolderLock::FolderLock(std::string dir)
    : dir_(std::move(dir)), path_(format("{}/{}", dir_, kName)) {
  acquire();
  heart_ = std::jthread([this](const std::stop_token& stop) { beat(stop); });
}

FolderLock::~FolderLock() {
  heart_.request_stop();
  if (heart_.joinable()) heart_.join();
  // Under the lock, so that no other can have it by now; else the file is another's.
  if (is_at(fd_, path_) && text_of(fd_) == owner_.text()) unlink(path_.c_str());
}

void FolderLock::acquire() {
  make_folders(dir_);
  const Deadline deadline(kPatience);
  while (true) {
    Fd fd(open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666));
    struct stat status {};
    if (!fd.valid() || fstat(fd.get(), &status) != 0)
      throw SystemError("cannot open " + path_, errno);
    if (!S_ISREG(status.st_mode)) throw ConfigError(format("{} is not a regular file", path_));
    const Taken taken = take(fd, path_);
    if (taken == Taken::moved) continue;  // its owner has just removed it
    if (taken == Taken::no) {
      if (deadline.passed()) refuse(dir_, text_of(fd), "");
      std::this_thread::sleep_for(kPause);
      continue;
    }
    require_dead(fd, dir_);
    LockOwner mine = LockOwner::self();
    if (const auto before = LockOwner::parse(text_of(fd))) {
      mine.generation = before->generation + 1;
      log::warn(
          format("checkpoint folder {}: the lock of {} is taken over, which has ended "
                 "without giving it back",
                 dir_, before->describe()));
    }
    const std::string text = mine.text();
    if (ftruncate(fd.get(), 0) != 0 ||
        pwrite(fd.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
      throw SystemError("cannot write " + path_, errno);
    }
    const std::lock_guard lock(mutex_);
    fd_ = std::move(fd);
    owner_ = std::move(mine);
    return;
  }
}

void FolderLock::require_free(const std::string& dir) {
  const auto path = format("{}/{}", dir, kName);
  const Deadline deadline(kPatience);
  while (true) {
    const Fd fd(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (!fd.valid()) return;
    const Taken taken = take(fd, path);
    if (taken == Taken::moved) continue;
    if (taken == Taken::yes) return require_dead(fd, dir);
    if (deadline.passed()) refuse(dir, text_of(fd), "");
    std::this_thread::sleep_for(kPause);
  }
}

void FolderLock::renew() {
  std::error_code error;
  if (fs::status(dir_, error).type() == fs::file_type::not_found) {
    log::warn(format("checkpoint folder {} is gone; it is made again", dir_));
    acquire();
  }
  require_held();
}

void FolderLock::require_held() const {
  const std::lock_guard lock(mutex_);
  if (!is_at(fd_, path_)) {
    throw LockLost(
        format("{} is no longer the lock of generation {} that this process, {}, took: it was "
               "removed, or another job has the folder now; nothing more is saved there",
               path_, owner_.generation, owner_.describe()));
  }
  const std::string text = text_of(fd_);
  if (text == owner_.text()) return;
  const auto other = LockOwner::parse(text);
  throw LockLost(
      format("checkpoint folder {} was taken over by {}, as generation {}; this process, {}, had "
             "generation {} and saves nothing more there",
             dir_, other ? other->describe() : "another process", other ? other->generation : 0,
             owner_.describe(), owner_.generation));
}

void FolderLock::beat(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, stop, kBeat, [] { return false; }) && !stop.stop_requested()) {
    // A sign of life that is not given is noticed by others; there is no caller to tell here.
    [[maybe_unused]] const int ignored = futimens(fd_.get(), nullptr);
  }
}

}  // namespace lockstep::io
