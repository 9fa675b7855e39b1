// SPDX-License-Identifier: Apache-2.0
#include "lockstep/fabric/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/system_memory.h"

namespace lockstep::fabric {
namespace {

// The kernel does not limit a memfd: asking it for too much ends with the out-of-memory killer,
// not with an error.
void require_room(size_t bytes) {
  if (const uint64_t room = available_memory(); bytes > room) {
    throw SystemError(
        format("cannot allocate {} bytes of shared memory, {} are available", bytes, room), ENOMEM);
  }
}

}  // namespace

std::string SegmentHandle::to_text() const { return format("{} {} {} {}", pid, fd, inode, bytes); }

SegmentHandle SegmentHandle::from_text(const std::string& text) {
  SegmentHandle handle;
  std::istringstream(text) >> handle.pid >> handle.fd >> handle.inode >> handle.bytes;
  return handle;
}

Segment::Segment(Segment&& other) noexcept { *this = std::move(other); }

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
  std::swap(handle_, other.handle_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, size_);
}

void Segment::map(int fd, size_t bytes, int flags) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (address == MAP_FAILED)
    throw SystemError(format("cannot map {} bytes of shared memory", bytes), errno);
  data_ = static_cast<std::byte*>(address);
  size_ = bytes;
  madvise(address, bytes,
          MADV_HUGEPAGE);  // fewer TLB misses where the system allows it for shared memory
}

Segment Segment::create(size_t bytes, const char* name) {
  require_room(bytes);  // first: its message says more than that of a reservation that fails
  Segment segment = reserve(bytes, name);
  segment.commit(0, bytes);
  return segment;
}

Segment Segment::reserve(size_t bytes, const char* name) {
  Segment segment;
  segment.fd_ = Fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!segment.fd_.valid()) throw SystemError("cannot create shared memory (memfd_create)", errno);
  const int fd = segment.fd_.get();
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    throw SystemError(format("cannot reserve {} bytes of shared memory", bytes), errno);
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw SystemError("cannot seal shared memory", errno);
  struct stat status {};
  if (fstat(fd, &status) != 0) throw SystemError("fstat of shared memory", errno);
  segment.handle_ = {getpid(), fd, status.st_ino, bytes};
  segment.map(fd, bytes, MAP_SHARED);
  return segment;
}

void Segment::commit(size_t offset, size_t bytes) const {
  require_room(bytes);
  // Allocating now makes "no room" an error here instead of a SIGBUS at the first touch.
  if (const int failure =
          posix_fallocate(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
      failure != 0)
    throw SystemError(format("cannot allocate {} bytes of shared memory", bytes), failure);
}

void Segment::discard(size_t offset, size_t bytes) const {
  // The kernel frees the whole pages of the range, and writes zeros to the rest of it.
  if (fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes)) != 0)
    std::memset(data_ + offset, 0, bytes);  // a system that cannot do that
}

Segment Segment::create_private(size_t bytes) {
  Segment segment;
  segment.map(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS);
  return segment;
}

Segment Segment::open(const SegmentHandle& handle) {
  const std::string path = format("/proc/{}/fd/{}", handle.pid, handle.fd);
  const Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.valid()) {
    throw SystemError(format("cannot open the shared memory of process {} ({}); ranks that share "
                             "memory must run as one user "
                             "in one process namespace",
                             handle.pid, path),
                      errno);
  }
  struct stat status {};
  if (fstat(fd.get(), &status) != 0 || status.st_ino != handle.inode ||
      static_cast<uint64_t>(status.st_size) != handle.bytes) {
    throw SystemError(format("{} is not the shared memory that was announced", path), ESTALE);
  }
  Segment segment;
  segment.map(fd.get(), handle.bytes, MAP_SHARED);
  return segment;
}

}  // namespace lockstep::fabric
