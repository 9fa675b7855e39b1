// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/file_calls.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>

namespace lockstep::io::calls {
namespace {

// A file that may not grow (RLIMIT_FSIZE) is an error, EFBIG, and not the signal by which the
// system would end the process. Blocked in this thread alone: what a program does about signals is
// its own.
class NoSizeSignal {
 public:
  NoSizeSignal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~NoSizeSignal() {
    const int error = errno;
    const timespec now{};
    if (error == EFBIG && sigismember(&before_, SIGXFSZ) == 0)
      sigtimedwait(&signal_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }
  NoSizeSignal(const NoSizeSignal&) = delete;
  NoSizeSignal& operator=(const NoSizeSignal&) = delete;

 private:
  sigset_t signal_{}, before_{};
};

}  // namespace

int create(const std::string& path) {
  return ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}

int reserve(int fd, uint64_t size) {
  const NoSizeSignal no_signal;
  return ::fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size));
}

ssize_t write(int fd, const std::byte* bytes, size_t size) {
  const NoSizeSignal no_signal;
  return ::write(fd, bytes, size);
}

void start_write_back(int fd, uint64_t offset, uint64_t size) {
  ::sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(size),
                    SYNC_FILE_RANGE_WRITE);
}

int sync(int fd) { return ::fsync(fd); }

int open_folder(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int rename(const std::string& from, const std::string& to) {
  return ::rename(from.c_str(), to.c_str());
}

int make_folder(const std::string& path) { return ::mkdir(path.c_str(), 0777); }
int remove_file(const std::string& path) { return ::unlink(path.c_str()); }
int remove_folder(const std::string& path) { return ::rmdir(path.c_str()); }

}  // namespace lockstep::io::calls
