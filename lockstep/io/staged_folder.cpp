// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/staged_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/io/durable.h"

namespace lockstep::io {
namespace {

namespace fs = std::filesystem;

// Without links, dots and a slash at the end, so that a name next to it can be formed.
std::string plain_path(const std::string& path) {
  std::error_code error;
  fs::path plain = fs::weakly_canonical(fs::absolute(path), error);
  if (error) throw SystemError("cannot find " + path, error.value());
  if (!plain.has_filename()) plain = plain.parent_path();
  return plain.string();
}

void require_replaceable(const std::string& path, const StagedFolderOptions& options) {
  std::error_code error;
  if (!fs::exists(path, error)) return;
  if (!fs::is_directory(path, error)) {
    throw ConfigError(format("{} is there and is not a folder; choose another place", path));
  }
  if (fs::is_empty(path, error)) return;
  if (options.replaces.empty()) {
    throw ConfigError(
        format("{} exists and is not empty; --force replaces it, or choose another place", path));
  }
  if (!fs::exists(path + "/" + options.replaces, error)) {
    throw ConfigError(
        format("{} has no {}: only a folder with one is replaced", path, options.replaces));
  }
}

}  // namespace

MadeFolders::MadeFolders(const std::string& path) {
  std::error_code error;
  fs::path missing = fs::absolute(path).lexically_normal();
  if (!missing.has_filename()) missing = missing.parent_path();
  while (!fs::exists(missing, error) && missing.has_relative_path()) {
    made_.push_back(missing.string());
    missing = missing.parent_path();
  }
  // A failure half way leaves what the destructor of an unfinished object would not see.
  try {
    make_folders(path);
  } catch (const Error&) {
    for (const auto& folder : made_) fs::remove(folder, error);
    throw;
  }
}

MadeFolders::~MadeFolders() {
  std::error_code error;
  for (const auto& folder : made_) fs::remove(folder, error);
}

StagedFolder::StagedFolder(const std::string& path, const StagedFolderOptions& options)
    : path_(plain_path(path)),
      temporary_(path_ + ".lockstep-tmp"),
      aside_(path_ + ".lockstep-old"),
      options_(options),
      parent_(fs::path(path_).parent_path().string()) {
  // A replacement that was cut off between its two renames.
  std::error_code error;
  if (fs::exists(aside_, error) && !fs::exists(path_, error)) rename_path(aside_, path_);
  require_replaceable(path_, options);
  lock();  // what another process left there is removed, what it still writes is not
  remove_tree(aside_);
  remove_tree(temporary_);
  make_folders(temporary_);
  lock();
}

// Where there is such a folder. A file system without locks lets all pass.
void StagedFolder::lock() {
  lock_ = Fd(open(temporary_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
  if (lock_.valid() && flock(lock_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw ConfigError(
        format("{} is being written by another process; wait for its end, or choose another place",
               path_));
  }
}

StagedFolder::~StagedFolder() {
  if (committed_) return;
  try {
    remove_tree(temporary_);
  } catch (const Error&) {  // the failure that brought us here is the one to report
  }
}

void StagedFolder::write(const std::string& name, std::string_view text) const {
  write_text(temporary_ + "/" + name, text);
}

void StagedFolder::commit() {
  sync_folder(temporary_);
  require_replaceable(path_, options_);  // again: writing took its time
  std::error_code error;
  const bool replaces = fs::exists(path_, error) && !fs::is_empty(path_, error);
  if (replaces) rename_path(path_, aside_);
  try {
    rename_path(temporary_, path_);  // over an empty folder too
  } catch (const Error&) {
    if (replaces) rename_path(aside_, path_);
    throw;
  }
  committed_ = true;
  parent_.keep();
  sync_folder(fs::path(path_).parent_path().string());
  if (replaces) remove_tree(aside_);
}

}  // namespace lockstep::io
