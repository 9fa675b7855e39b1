// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/durable.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/io/crc32c.h"
#include "lockstep/io/file_calls.h"

namespace lockstep::io {
namespace {

namespace fs = std::filesystem;

// The disk begins with so many bytes at a time, so that little is left to wait for in the end.
constexpr uint64_t kWriteBack = uint64_t{32} << 20;

// Not everywhere can space be set aside; then writes notice that there is none.
bool cannot_reserve(int error) { return error == EOPNOTSUPP || error == EINVAL || error == ENOSYS; }

// Where that is why.
std::string free_space(const std::string& path, int error) {
  if (error != ENOSPC && error != EDQUOT) return "";
  std::error_code unknown;
  const auto space = fs::space(fs::absolute(path).parent_path(), unknown);
  return unknown ? "" : format(" ({} bytes are free there)", space.available);
}

}  // namespace

DurableFile::DurableFile(std::string path, uint64_t size) : path_(std::move(path)) {
  if (calls::remove_file(path_) != 0 && errno != ENOENT) {
    throw SystemError("cannot replace " + path_, errno);
  }
  fd_ = Fd(calls::create(path_));
  if (!fd_.valid()) throw SystemError("cannot create " + path_, errno);
  while (size > 0 && calls::reserve(fd_.get(), size) != 0 && !cannot_reserve(errno)) {
    if (errno == EINTR) continue;
    const int reason = errno;
    throw SystemError(
        format("cannot reserve {} bytes for {}{}", size, path_, free_space(path_, reason)), reason);
  }
}

// In whole blocks, each written from where its bytes are, right after its checksum brought them
// into the cache.
void DurableFile::write(std::span<const std::byte> bytes) {
  if (!buffer_.empty()) {
    const auto part = bytes.first(std::min<size_t>(bytes.size(), kBlockBytes - buffer_.size()));
    keep(part);
    bytes = bytes.subspan(part.size());
    if (buffer_.size() < kBlockBytes) return;
    write_block(buffer_);
    buffer_.clear();
  }
  while (bytes.size() >= kBlockBytes) {
    write_block(bytes.first(kBlockBytes));
    bytes = bytes.subspan(kBlockBytes);
  }
  keep(bytes);
}

void DurableFile::keep(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const size_t held = buffer_.size();
  buffer_.resize(held + bytes.size());
  std::memcpy(buffer_.data() + held, bytes.data(), bytes.size());
}

void DurableFile::write_block(std::span<const std::byte> bytes) {
  record_.blocks.push_back(crc32c(bytes));
  while (!bytes.empty()) {
    const ssize_t count = calls::write(fd_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    // A regular file that takes nothing and gives no reason would keep us here for ever.
    if (count == 0) errno = ENOSPC;
    if (count <= 0) {
      const int reason = errno;
      throw SystemError(
          format("cannot write {} at byte {}{}", path_, record_.bytes, free_space(path_, reason)),
          reason);
    }
    bytes = bytes.subspan(static_cast<size_t>(count));
    record_.bytes += static_cast<uint64_t>(count);
  }
  if (record_.bytes - started_ >= kWriteBack) {
    calls::start_write_back(fd_.get(), started_, record_.bytes - started_);
    started_ = record_.bytes;
  }
}

FileRecord DurableFile::finish() {
  if (!buffer_.empty()) write_block(buffer_);
  buffer_ = {};
  if (calls::sync(fd_.get()) != 0) throw SystemError("cannot sync " + path_, errno);
  fd_.reset();
  return record_;
}

void write_text(const std::string& path, std::string_view text) {
  DurableFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.finish();
}

void sync_folder(const std::string& path) {
  const Fd fd(calls::open_folder(path));
  // Some network file systems cannot sync a folder, and say EINVAL: their renames are durable.
  if (!fd.valid() || (calls::sync(fd.get()) != 0 && errno != EINVAL)) {
    throw SystemError("cannot sync folder " + path, errno);
  }
}

void rename_path(const std::string& from, const std::string& to) {
  if (calls::rename(from, to) != 0)
    throw SystemError(format("cannot rename {} to {}", from, to), errno);
}

void replace_link(const std::string& target, const std::string& path) {
  const std::string temporary = path + ".tmp";
  remove_tree(temporary);
  if (symlink(target.c_str(), temporary.c_str()) != 0)
    throw SystemError(format("cannot make the link {}", temporary), errno);
  rename_path(temporary, path);
  sync_folder(fs::path(path).parent_path().string());
}

void make_folders(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return;
  const auto absolute = fs::absolute(path).lexically_normal();
  const auto parent = absolute.parent_path().string();
  if (parent != absolute) make_folders(parent);
  if (calls::make_folder(path) != 0) {
    const int reason = errno;
    // Another rank may have been first.
    if (reason == EEXIST && fs::is_directory(path, error)) return;
    throw SystemError("cannot create folder " + path, reason);
  }
  sync_folder(parent);
}

void remove_tree(const std::string& path) {
  std::error_code error;
  const auto status = fs::symlink_status(path, error);
  if (status.type() == fs::file_type::none)
    throw SystemError("cannot look at " + path, error.value());
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status)) {
    if (calls::remove_file(path) != 0) throw SystemError("cannot remove " + path, errno);
    return;
  }
  std::vector<std::string> inside;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    inside.push_back(entry->path().string());
  }
  if (error) throw SystemError("cannot list " + path, error.value());
  std::sort(inside.begin(), inside.end());
  for (const auto& name : inside) remove_tree(name);
  if (calls::remove_folder(path) != 0) throw SystemError("cannot remove folder " + path, errno);
}

}  // namespace lockstep::io
