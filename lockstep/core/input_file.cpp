// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/input_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "lockstep/core/format.h"

namespace lockstep {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

// When the file was made, in nanoseconds, where the file system knows: another file may have the
// number of one that was removed.
int64_t birth_of(const Fd& fd) {
  struct statx status {};
  if (statx(fd.get(), "", AT_EMPTY_PATH, STATX_BTIME, &status) != 0 ||
      (status.stx_mask & STATX_BTIME) == 0) {
    return 0;
  }
  return status.stx_btime.tv_sec * 1'000'000'000 + status.stx_btime.tv_nsec;
}

}  // namespace

// O_NONBLOCK: a pipe is opened, and then refused, where else the other end would be waited for.
Fd open_input(const std::string& path, struct stat& status) {
  // A socket cannot be opened at all, and its error says nothing that helps.
  if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw ConfigError(
        format("cannot read {}: it is {}, must be a regular file", path, kind_of(status.st_mode)));
  }
  Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd.valid() || fstat(fd.get(), &status) != 0) throw SystemError("cannot read " + path, errno);
  if (!S_ISREG(status.st_mode)) {
    throw ConfigError(
        format("cannot read {}: it is {}, must be a regular file", path, kind_of(status.st_mode)));
  }
  return fd;
}

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  struct stat status {};
  fd_ = open_input(path_, status);
  size_ = static_cast<uint64_t>(status.st_size);
  modified_ = status.st_mtim.tv_sec;
  device_ = status.st_dev;
  inode_ = status.st_ino;
  birth_ = birth_of(fd_);
}

Fd InputFile::opened() const {
  struct stat status {};
  Fd fd;
  try {
    fd = open_input(path_, status);
  } catch (const Error& failure) {
    throw DataError(format("{} was removed while it is in use: {}", path_, failure.what()));
  }
  if (status.st_dev != device_ || status.st_ino != inode_ || birth_of(fd) != birth_) {
    throw DataError(format("{} was replaced by another file while it is in use", path_));
  }
  return fd;
}

void InputFile::read(uint64_t offset, std::span<std::byte> out) const {
  const Fd again = fd_.valid() ? Fd() : opened();
  const int fd = fd_.valid() ? fd_.get() : again.get();
  while (!out.empty()) {
    const ssize_t count = pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw SystemError(format("cannot read {} at byte {}", path_, offset), errno);
    if (count == 0) {
      struct stat status {};
      fstat(fd, &status);
      throw DataError(
          format("{} had {} bytes when it was opened and has {} now: it must not "
                 "shrink while it is in use; restore it and start again",
                 path_, size_, status.st_size));
    }
    out = out.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
}

std::string read_text(const std::string& path, uint64_t most) {
  const InputFile file(path);
  if (file.size() > most) {
    throw ConfigError(
        format("cannot read {}: it has {} bytes, must have at most {}", path, file.size(), most));
  }
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace lockstep
