#include "lockstep/formats/durable.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/io.h"

namespace lockstep::formats {
namespace {

namespace fs = std::filesystem;

// Large enough that system calls cost nothing, small enough that bytes are still in the cache when
// they are written after their checksum was taken.
constexpr size_t kPiece = size_t{1} << 20;

}  // namespace

DurableFile::DurableFile(std::string path) : path_(std::move(path)) {
  if (io::remove_file(path_) != 0 && errno != ENOENT) {
    throw SystemError("cannot replace " + path_, errno);
  }
  fd_ = Fd(io::create(path_));
  if (!fd_.valid()) throw SystemError("cannot create " + path_, errno);
}

void DurableFile::write(std::span<const std::byte> bytes) {
  if (buffer_.size() + bytes.size() < kPiece) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    return;
  }
  flush();
  while (bytes.size() >= kPiece) {
    write_out(bytes.first(kPiece));
    bytes = bytes.subspan(kPiece);
  }
  buffer_.assign(bytes.begin(), bytes.end());
}

void DurableFile::flush() {
  write_out(buffer_);
  buffer_.clear();
}

void DurableFile::write_out(std::span<const std::byte> bytes) {
  crc_.update(bytes);
  while (!bytes.empty()) {
    const ssize_t count = io::write(fd_.get(), bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    // A regular file that takes nothing and gives no reason would keep us here for ever.
    if (count == 0) errno = ENOSPC;
    if (count <= 0) {
      throw SystemError(format("cannot write {} at byte {}", path_, written_), errno);
    }
    bytes = bytes.subspan(static_cast<size_t>(count));
    written_ += static_cast<uint64_t>(count);
  }
}

void DurableFile::finish() {
  flush();
  if (io::sync(fd_.get()) != 0) throw SystemError("cannot sync " + path_, errno);
  fd_.reset();
}

void sync_folder(const std::string& path) {
  const Fd fd(io::open_folder(path));
  // Some network file systems cannot sync a folder, and say EINVAL: their renames are durable.
  if (!fd.valid() || (io::sync(fd.get()) != 0 && errno != EINVAL)) {
    throw SystemError("cannot sync folder " + path, errno);
  }
}

void rename_path(const std::string& from, const std::string& to) {
  if (io::rename(from, to) != 0)
    throw SystemError(format("cannot rename {} to {}", from, to), errno);
}

void make_folders(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return;
  const auto absolute = fs::absolute(path).lexically_normal();
  const auto parent = absolute.parent_path().string();
  if (parent != absolute) make_folders(parent);
  if (io::make_folder(path) != 0) {
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
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status)) {
    if (io::remove_file(path) != 0) throw SystemError("cannot remove " + path, errno);
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
  if (io::remove_folder(path) != 0) throw SystemError("cannot remove folder " + path, errno);
}

}  // namespace lockstep::formats
