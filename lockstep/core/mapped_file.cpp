// SPDX-License-Identifier: Apache-2.0
#include "lockstep/core/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/input_file.h"

namespace lockstep {

MappedFile::MappedFile(const std::string& path) {
  struct stat status {};
  const Fd fd = open_input(path, status);
  if (status.st_size == 0) return;
  const auto size = static_cast<size_t>(status.st_size);
  void* const memory = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) throw SystemError("cannot map " + path, errno);
  bytes_ = {static_cast<const std::byte*>(memory), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace lockstep
