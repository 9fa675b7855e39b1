// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/checked_file.h"

#include <algorithm>
#include <future>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/io/crc32c.h"

namespace lockstep::formats {
namespace {

// Of a long read at a time: few calls, and most of it is still in the cache for the checksums.
constexpr uint64_t kStride = 4 * io::kBlockBytes;

}  // namespace

CheckedFile::CheckedFile(std::string path, const io::FileRecord& record, bool verify)
    : file_(std::move(path)), record_(record), verify_(verify) {
  if (file_.size() != record_.bytes) {
    throw CheckpointError(format("{}: has {} bytes, its manifest says {}", file_.path(),
                                 file_.size(), record_.bytes));
  }
}

void CheckedFile::read(uint64_t offset, std::span<std::byte> out) {
  check(offset <= record_.bytes && out.size() <= record_.bytes - offset, "reads lie in the file");
  while (!out.empty()) {
    const uint64_t block = offset / io::kBlockBytes;
    const uint64_t skipped = offset % io::kBlockBytes;
    // Up to the last end of a block, if any.
    uint64_t end = offset + out.size();
    if (end != record_.bytes) end -= end % io::kBlockBytes;
    size_t count = 0;
    if (skipped == 0 && end > offset) {
      count = end - offset;
      read_blocks(block, out.first(count));
    } else {
      const auto bytes = kept(block).subspan(skipped);
      count = std::min(bytes.size(), out.size());
      std::copy_n(bytes.begin(), count, out.begin());
    }
    out = out.subspan(count);
    offset += count;
  }
}

SafetensorsHeader CheckedFile::header() {
  std::vector<std::byte> head(std::min<uint64_t>(8, record_.bytes));
  read(0, head);
  head.resize(safetensors_data_begin(head, record_.bytes, path()));
  read(0, head);
  return parse_safetensors(head, record_.bytes, path());
}

// While one stride is compared, the next is read. The system reads ahead by itself: advice to do so
// (SEQUENTIAL, WILLNEED) made it slower.
void CheckedFile::read_blocks(uint64_t block, std::span<std::byte> out) {
  std::future<void> comparing;
  while (!out.empty()) {
    const auto bytes = out.first(std::min<size_t>(kStride, out.size()));
    out = out.subspan(bytes.size());
    file_.read(block * io::kBlockBytes, bytes);
    bytes_read_ += bytes.size();
    if (comparing.valid()) comparing.get();
    if (verify_ && !out.empty()) {
      comparing = std::async(std::launch::async, [=, this] { compare(block, bytes); });
    } else if (verify_) {
      compare(block, bytes);
    }
    block += kStride / io::kBlockBytes;
  }
}

void CheckedFile::compare(uint64_t block, std::span<const std::byte> bytes) const {
  for (; !bytes.empty(); ++block) {
    const auto part = bytes.first(std::min<size_t>(io::kBlockBytes, bytes.size()));
    if (const uint32_t crc = io::crc32c(part); crc != record_.blocks[block]) {
      throw CheckpointError(
          format("{}: is damaged: bytes {} to {} have CRC32C {:08x}, the manifest says {:08x}",
                 path(), block * io::kBlockBytes, block * io::kBlockBytes + part.size(), crc,
                 record_.blocks[block]));
    }
    bytes = bytes.subspan(part.size());
  }
}

std::span<const std::byte> CheckedFile::kept(uint64_t block) {
  if (kept_.empty() || kept_block_ != block) {
    // Nothing is kept if this fails.
    auto bytes = std::exchange(kept_, {});
    bytes.resize(std::min(io::kBlockBytes, record_.bytes - block * io::kBlockBytes));
    read_blocks(block, bytes);
    kept_ = std::move(bytes);
    kept_block_ = block;
  }
  return kept_;
}

}  // namespace lockstep::formats
