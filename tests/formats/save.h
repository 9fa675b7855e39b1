// SPDX-License-Identifier: Apache-2.0
// Small checkpoints for tests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/shard_file.h"
#include "lockstep/io/crc32c.h"
#include "lockstep/io/file_record.h"
#include "lockstep/io/regular_file.h"

namespace lockstep::formats::test_support {

// Of a file that lies there, read whole.
inline io::FileRecord record_of(const std::string& path) {
  const io::RegularFile file(path);
  io::FileRecord record{.bytes = file.size()};
  std::vector<std::byte> block(io::kBlockBytes);
  for (uint64_t begin = 0; begin < record.bytes; begin += io::kBlockBytes) {
    const auto bytes = std::span(block).first(std::min(io::kBlockBytes, record.bytes - begin));
    file.read(begin, bytes);
    record.blocks.push_back(io::crc32c(bytes));
  }
  return record;
}

inline io::FileRecord write_shard(const std::string& folder, const std::string& file,
                                  const std::vector<ShardSlice>& slices, int seed) {
  auto writer = open_shard(folder, file, slices);
  for (const auto& entry : writer.entries()) {
    const std::vector<std::byte> bytes(entry.size(), static_cast<std::byte>(seed));
    writer.write(entry.name, bytes);
  }
  return writer.finish();
}

// Two shards of one tensor, whose bytes are `seed`.
inline std::string save(const std::string& dir, int64_t step, int seed = 0) {
  const auto folder = begin_checkpoint(dir, step);
  Manifest manifest{.step = step};
  for (int shard = 1; shard <= 2; ++shard) {
    const auto file = shard_file_name(shard);
    const std::vector<ShardSlice> slices = {
        {"w", "F32", {8, 4}, {{{4 * shard - 4, 4 * shard}, {0, 4}}}}};
    manifest.merge(shard_manifest(step, file, write_shard(folder, file, slices, seed), slices));
  }
  manifest.state["seed"] = std::to_string(seed);
  return commit_checkpoint(dir, manifest);
}

// Tensors of 4-byte types, whose i-th element (row-major, in the whole tensor) is `first` + i.
inline io::FileRecord write_numbers(const std::string& folder, const std::string& file,
                                    const std::vector<ShardSlice>& slices, int32_t first = 0) {
  auto writer = open_shard(folder, file, slices);
  for (const auto& entry : writer.entries()) {
    for (const auto& slice : slices) {
      if (slice.name != entry.name) continue;
      std::vector<int32_t> values(static_cast<size_t>(slice.box.numel()));
      const auto fill = [&](const layout::ContiguousRun& run) {
        const auto begin = values.begin() + run.to;
        std::iota(begin, begin + run.size, first + static_cast<int32_t>(run.from));
      };
      layout::for_each_run(slice.box, layout::Box::whole(slice.shape), slice.box, fill);
      writer.write(entry.name, std::as_bytes(std::span(values)));
    }
  }
  return writer.finish();
}

// A file for each list of slices.
inline std::string save_numbers(const std::string& dir, int64_t step,
                                const std::vector<std::vector<ShardSlice>>& files) {
  const auto folder = begin_checkpoint(dir, step);
  Manifest manifest{.step = step};
  for (size_t i = 0; i < files.size(); ++i) {
    const auto file = shard_file_name(static_cast<int>(i) + 1);
    manifest.merge(shard_manifest(step, file, write_numbers(folder, file, files[i]), files[i]));
  }
  return commit_checkpoint(dir, manifest);
}

}  // namespace lockstep::formats::test_support
