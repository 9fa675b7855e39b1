// SPDX-License-Identifier: Apache-2.0
// A new folder in memory, where the system has one, for tests that write many files.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "tests/support/subprocess.h"

namespace lockstep::formats::test_support {

class MemoryDir {
 public:
  MemoryDir() {
    std::error_code ignored;
    const auto path = "/dev/shm/lockstep-test-" + std::to_string(getpid());
    if (std::filesystem::create_directory(path, ignored)) path_ = path;
  }
  ~MemoryDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  MemoryDir(const MemoryDir&) = delete;
  MemoryDir& operator=(const MemoryDir&) = delete;

  const std::string& path() const { return path_; }

 private:
  test::TempDir elsewhere_;
  std::string path_ = elsewhere_.path();
};

}  // namespace lockstep::formats::test_support
