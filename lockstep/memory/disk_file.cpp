// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/disk_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"

namespace lockstep::memory::detail {
namespace {

constexpr size_t kBounce = size_t{4} << 20;

Fd open_unnamed(const std::string& folder) {
  Fd file(open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  // File systems that have no files without a name, and kernels that do not know of them.
  if (!file.valid() && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
    std::string name = folder + "/lockstep-XXXXXX";
    file = Fd(mkostemp(name.data(), O_CLOEXEC));
    if (file.valid()) unlink(name.c_str());
  }
  if (!file.valid()) {
    throw ConfigError(
        format("[disk store] cannot create a file in {}: {}; name a folder that can be "
               "written",
               folder, std::strerror(errno)));
  }
  return file;
}

std::string free_space(int file) {
  struct statvfs status {};
  if (fstatvfs(file, &status) != 0) return "an unknown number of bytes";
  return size_text(static_cast<int64_t>(status.f_bavail * status.f_frsize));
}

}  // namespace

DiskFile::DiskFile(std::string folder)
    : folder_(std::move(folder)), file_(open_unnamed(folder_)), bounce_() {
  // Some file systems take the flag and then refuse to write.
  set_direct(true);
  if (!direct_) return;
  const AddressRange block(kBlock, AddressRange::Access::read_write);
  if (pwrite(file_.get(), block.data(), kBlock, 0) != static_cast<ssize_t>(kBlock))
    set_direct(false);
  discard();
}

void DiskFile::set_direct(bool direct) {
  const int flags = fcntl(file_.get(), F_GETFL);
  const bool done = fcntl(file_.get(), F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
  if (done) direct_ = direct;
}

void DiskFile::write(std::span<const std::byte> bytes, size_t offset) {
  const bool aligned = reinterpret_cast<uintptr_t>(bytes.data()) % kBlock == 0;
  const size_t whole = !direct_ ? bytes.size() : aligned ? bytes.size() / kBlock * kBlock : 0;
  write_part(bytes.first(whole), offset, bytes.size());
  if (whole < bytes.size() && bounce_.data() == nullptr)
    bounce_ = AddressRange(kBounce, AddressRange::Access::read_write);
  for (size_t at = whole; at < bytes.size(); at += kBounce) {
    const auto part = bytes.subspan(at, std::min(kBounce, bytes.size() - at));
    const size_t size = rounded(part.size());
    std::memcpy(bounce_.data(), part.data(), part.size());
    std::memset(bounce_.data() + part.size(), 0, size - part.size());
    write_part({bounce_.data(), size}, offset + at, bytes.size());
  }
}

void DiskFile::write_part(std::span<const std::byte> bytes, size_t offset, size_t wanted) {
  for (size_t written = 0; written < bytes.size();) {
    const ssize_t count = pwrite(file_.get(), bytes.data() + written, bytes.size() - written,
                                 static_cast<off_t>(offset + written));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL && direct_) {
      // What is left up to a limit is no whole block. The page cache takes it, or has a better
      // reason.
      set_direct(false);
      continue;
    }
    if (count <= 0) {
      const int reason = count < 0 ? errno : EIO;
      throw SystemError(
          format("[disk store] cannot write {} bytes to a file in {}, which has {}; {} are free",
                 wanted, folder_, offset + written, free_space(file_.get())),
          reason);
    }
    written += static_cast<size_t>(count);
  }
}

void DiskFile::read(std::span<std::byte> bytes, size_t offset) {
  for (size_t have = 0; have < bytes.size();) {
    const size_t left = bytes.size() - have;
    const ssize_t count = pread(file_.get(), bytes.data() + have, direct_ ? rounded(left) : left,
                                static_cast<off_t>(offset + have));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL && direct_) {
      set_direct(false);
      continue;
    }
    if (count <= 0) {
      throw SystemError(format("[disk store] cannot read {} bytes at {} of a file in {}",
                               bytes.size(), offset, folder_),
                        count < 0 ? errno : EIO);
    }
    have += static_cast<size_t>(count);
  }
}

void DiskFile::discard() noexcept {
  // Where it fails the space stays taken until the file goes.
  [[maybe_unused]] const int result = ftruncate(file_.get(), 0);
}

}  // namespace lockstep::memory::detail
