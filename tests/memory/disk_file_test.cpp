// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/disk_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <span>
#include <system_error>
#include <vector>

#include "tests/support/subprocess.h"

namespace lockstep::memory::detail {
namespace {

constexpr size_t kMega = size_t{1} << 20, kBlock = DiskFile::kBlock;

std::vector<std::byte> data_of(size_t size) {
  std::vector<std::byte> data(size);
  uint32_t state = 12345;
  for (std::byte& byte : data) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::byte>(state >> 24);
  }
  return data;
}

class DiskFileTest : public testing::Test {
 protected:
  // The file once more, which has no name: without O_DIRECT, as others would see it.
  Fd opened_again() const {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      if (read_symlink(entry, gone).string().starts_with(folder_.path() + "/"))
        return Fd(open(entry.path().c_str(), O_RDONLY | O_CLOEXEC));
    }
    return {};
  }

  const test::TempDir folder_;
  DiskFile file_{folder_.path()};
};

// Memory that does not begin at a page, and sizes about that of what goes through a buffer at once.
TEST_F(DiskFileTest, TakesBytesFromAnywhere) {
  const std::vector<std::byte> data = data_of(10 * kMega);
  const size_t page = kBlock - reinterpret_cast<uintptr_t>(data.data()) % kBlock;
  const AddressRange found(10 * kMega, AddressRange::Access::read_write);
  for (const size_t begin : {page, page + 1, page + 512, page + 4095}) {
    for (const size_t size : {size_t{0}, size_t{1}, size_t{4096}, size_t{12'345}, 4 * kMega - 1,
                              4 * kMega, 4 * kMega + 1, 9 * kMega + 4095}) {
      const auto part = std::span(data).subspan(begin, size);
      file_.write(part, 3 * kBlock);
      std::memset(found.data(), 0, found.size());
      file_.read({found.data(), size}, 3 * kBlock);
      ASSERT_EQ(std::memcmp(found.data(), part.data(), size), 0) << begin << " " << size;
    }
  }
}

TEST_F(DiskFileTest, KeepsToItsPlace) {
  const std::vector<std::byte> data = data_of(5 * kBlock);
  file_.write(std::span(data).first(3 * kBlock), 0);
  file_.write(std::span(data).subspan(3 * kBlock, kBlock + 7), kBlock);  // in the middle
  const AddressRange found(3 * kBlock, AddressRange::Access::read_write);
  file_.read({found.data(), 3 * kBlock}, 0);
  EXPECT_EQ(std::memcmp(found.data(), data.data(), kBlock), 0);
  EXPECT_EQ(std::memcmp(found.data() + kBlock, data.data() + 3 * kBlock, kBlock + 7), 0);
}

TEST_F(DiskFileTest, WhatIsDirectIsNotInThePageCache) {
  const std::vector<std::byte> data = data_of(2'000'000);
  const AddressRange found(DiskFile::rounded(data.size()), AddressRange::Access::read_write);
  const bool direct = file_.direct();
  file_.write(std::span(data).subspan(1), 0);
  file_.read({found.data(), data.size() - 1}, 0);
  EXPECT_EQ(file_.direct(), direct);  // it did not have to be given up
  const Fd again = opened_again();
  ASSERT_TRUE(again.valid());
  struct statfs system {};
  ASSERT_EQ(fstatfs(again.get(), &system), 0);
  if (system.f_type == TMPFS_MAGIC) return;  // is nothing but page cache
  void* const mapped = mmap(nullptr, data.size(), PROT_READ, MAP_SHARED, again.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  std::vector<unsigned char> present(found.size() / kBlock);
  EXPECT_EQ(mincore(mapped, data.size(), present.data()), 0);
  munmap(mapped, data.size());
  const bool none = std::ranges::none_of(present, [](auto bits) { return (bits & 1) != 0; });
  EXPECT_EQ(none, file_.direct());
}

// Old tmpfs does not have it; nothing else that a scratch folder is on lacks it.
TEST_F(DiskFileTest, IsDirectWhereTheFileSystemCanDoThat) {
  const Fd own(open(folder_.path().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_DIRECT, 0600));
  EXPECT_EQ(file_.direct(), own.valid());
  const Fd again = opened_again();
  ASSERT_TRUE(again.valid());
  EXPECT_EQ(lseek(again.get(), 0, SEEK_END), 0);  // nothing of the attempt is left
}

TEST_F(DiskFileTest, GivesItsSpaceBack) {
  file_.write(data_of(100'000), 0);
  const Fd again = opened_again();
  EXPECT_GE(lseek(again.get(), 0, SEEK_END), 100'000);
  file_.discard();
  EXPECT_EQ(lseek(again.get(), 0, SEEK_END), 0);
}

}  // namespace
}  // namespace lockstep::memory::detail
