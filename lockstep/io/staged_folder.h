// SPDX-License-Identifier: Apache-2.0
// A folder that appears under its name whole, or not at all. Private: not installed.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/core/fd.h"

namespace lockstep::io {

// Makes a folder and its missing parents. Unless keep() is called, those it made and that are empty
// are removed with it.
class MadeFolders {
 public:
  explicit MadeFolders(const std::string& path);
  ~MadeFolders();
  MadeFolders(const MadeFolders&) = delete;
  MadeFolders& operator=(const MadeFolders&) = delete;

  void keep() { made_.clear(); }

 private:
  std::vector<std::string> made_;  // the deepest first
};

struct StagedFolderOptions {
  // Takes the place of a folder that has this file; empty: of an empty folder only. A caller that
  // names the wrong folder should not lose it.
  std::string replaces = {};
};

// Files are written to folder(), next to the final place; commit() puts that in place. Destroyed
// before, it leaves nothing. Failures of the disk are SystemErrors.
class StagedFolder {
 public:
  // ConfigError where something is at `path` that may not be replaced, or another process writes
  // there.
  StagedFolder(const std::string& path, const StagedFolderOptions& options = {});
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  const std::string& folder() const { return temporary_; }
  void write(const std::string& name, std::string_view text) const;
  void commit();

 private:
  void lock();

  std::string path_, temporary_, aside_;
  StagedFolderOptions options_;
  MadeFolders parent_;
  Fd lock_;  // of the temporary folder, whose end is that of this process at the latest
  bool committed_ = false;
};

}  // namespace lockstep::io
