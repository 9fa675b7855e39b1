// SPDX-License-Identifier: Apache-2.0
// For readers in other languages: writes a checkpoint whose values they know, and says what it
// reads.
//   write_checkpoint save DIR     a checkpoint of step 7, cut in several ways; prints its folder
//   write_checkpoint print FILE   a line for each tensor: name, dtype, shape, CRC32C of its bytes
// Element i (row-major, in the whole tensor) is i * 3 + 1, as float32, bfloat16, int64 or uint8.
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/safetensors.h"
#include "lockstep/formats/shard_file.h"
#include "lockstep/io/crc32c.h"
#include "lockstep/layout/shard_math.h"

namespace {

using namespace lockstep::formats;
using lockstep::layout::balanced_range;
using lockstep::layout::Box;
using lockstep::layout::Range;

template <class T>
void append(std::vector<std::byte>& bytes, T value) {
  const auto* const first = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), first, first + sizeof(T));
}

void append_element(std::vector<std::byte>& bytes, const std::string& dtype, int64_t index) {
  const int64_t value = index * 3 + 1;
  if (dtype == "F32") append(bytes, static_cast<float>(value));
  if (dtype == "I64") append(bytes, value);
  if (dtype == "U8") append(bytes, static_cast<uint8_t>(value));
  if (dtype == "BF16") {
    // Small whole numbers: the upper half of the float is exact.
    const auto number = static_cast<float>(value);
    uint32_t bits = 0;
    std::memcpy(&bits, &number, 4);
    append(bytes, static_cast<uint16_t>(bits >> 16));
  }
}

std::vector<std::byte> bytes_of(const ShardSlice& slice) {
  std::vector<std::byte> bytes;
  const auto rows = slice.box.ranges[0];
  const auto columns = slice.shape.size() == 2 ? slice.box.ranges[1] : Range{0, 1};
  const auto width = slice.shape.size() == 2 ? slice.shape[1] : 1;
  for (auto row = rows.begin; row < rows.end; ++row) {
    for (auto column = columns.begin; column < columns.end; ++column) {
      append_element(bytes, slice.dtype, row * width + column);
    }
  }
  return bytes;
}

std::vector<ShardSlice> slices_of(int shard) {
  const auto third = [&](int64_t size) { return balanced_range(size, 3, shard); };
  std::vector<ShardSlice> slices = {
      {"rows.weight", "F32", {10, 6}, {{third(10), {0, 6}}}},
      {"columns.weight", "BF16", {4, 8}, {{{0, 4}, third(8)}}},
      {"optim.exp_avg.rows.weight", "F32", {10, 6}, {{third(10), {0, 6}}}},
      // A fused matrix: from each of its two halves, every shard has a part.
      {"fused", "F32", {12, 2}, {{third(6), {0, 2}}}},
      {"fused", "F32", {12, 2}, {{{6 + third(6).begin, 6 + third(6).end}, {0, 2}}}}};
  if (shard == 0) {
    slices.push_back({"whole", "U8", {5}, Box::whole({5})});
    slices.push_back({"scalar", "I64", {}, Box::whole({})});
    slices.push_back({"empty", "F32", {0, 3}, Box::whole({0, 3})});
  }
  return slices;
}

void save(const std::string& dir) {
  Manifest manifest{.step = 7, .state = {{"samples", "1000"}}, .config = R"({"layers":2})"};
  const auto folder = begin_checkpoint(dir, manifest.step);
  for (int shard = 0; shard < 3; ++shard) {
    const auto all = slices_of(shard);
    const auto parts = shard_parts(all);
    for (size_t part = 0; part < parts.size(); ++part) {
      std::vector<ShardSlice> slices;
      for (const size_t index : parts[part]) slices.push_back(all[index]);
      const auto file =
          shard_file_name(shard + 1, static_cast<int>(part) + 1, static_cast<int>(parts.size()));
      auto writer = open_shard(folder, file, slices);
      for (const auto& entry : writer.entries()) {
        for (const auto& slice : slices) {
          if (slice.name == entry.name) writer.write(slice.name, bytes_of(slice));
        }
      }
      manifest.merge(shard_manifest(manifest.step, file, writer.finish(), slices));
    }
  }
  std::puts(commit_checkpoint(dir, manifest).c_str());
}

void print(const std::string& path) {
  const SafetensorsFile file(path);
  for (const auto& entry : file.entries()) {
    std::printf("%s %s %s %08x\n", entry.name.c_str(), entry.dtype.c_str(),
                lockstep::layout::describe(entry.shape).c_str(),
                lockstep::io::crc32c(file.bytes(entry)));
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string command = argc == 3 ? argv[1] : "";
  if (command == "save") {
    save(argv[2]);
  } else if (command == "print") {
    print(argv[2]);
  } else {
    throw std::runtime_error("usage: write_checkpoint save DIR | print FILE");
  }
  return 0;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s\n", failure.what());
  return 1;
}
