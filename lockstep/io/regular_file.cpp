// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::io {

void require_regular(const std::string& path, mode_t mode) {
  if (S_ISREG(mode)) return;
  throw CheckpointError(format("{}: is {}; a checkpoint has plain files only", path,
                               S_ISLNK(mode) ? "a symbolic link" : "not a regular file"));
}

RegularFile::RegularFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: a pipe under this name is refused, not waited for.
  fd_ = Fd(open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd_.valid() && errno == ELOOP) require_regular(path_, S_IFLNK);
  struct stat status {};
  if (!fd_.valid() || fstat(fd_.get(), &status) != 0) {
    throw SystemError("cannot read " + path_, errno);
  }
  require_regular(path_, status.st_mode);
  size_ = static_cast<uint64_t>(status.st_size);
}

void RegularFile::read(uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t count = pread(fd_.get(), out.data(), out.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw SystemError(format("cannot read {} at byte {}", path_, offset), errno);
    if (count == 0) {
      throw CheckpointError(format("{}: ends at byte {}, had {}", path_, offset, size_));
    }
    out = out.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
}

}  // namespace lockstep::io
