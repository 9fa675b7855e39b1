// SPDX-License-Identifier: Apache-2.0
// Many damaged checkpoints: every tensor is read as it was saved, or refused; never anything else.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <span>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/formats/checkpoint_reader.h"
#include "lockstep/io/crc32c.h"
#include "tests/formats/memory_dir.h"
#include "tests/formats/mutate.h"
#include "tests/formats/save.h"
#include "tests/support/sampling.h"
#include "tests/support/subprocess.h"

namespace lockstep::formats {
namespace {

using layout::Box;
using test_support::save_numbers;
using Files = std::map<std::string, std::string>;  // by name, with their bytes

const char* const kPieces[] = {"{",
                               "}",
                               "[",
                               "]",
                               ",",
                               ":",
                               "\"",
                               "null",
                               "-1",
                               "1e400",
                               "0",
                               "1",
                               "2",
                               "4",
                               "1048577",
                               "9223372036854775807",
                               "18446744073709551615",
                               "\"shape\":[1],",
                               "\"offsets\":[0,2]",
                               "\"w\":",
                               "I64",
                               "F4",
                               "00001",
                               "00002",
                               "../",
                               "\\u0000",
                               "\xff",
                               "[[[[[[[["};

// With a right checksum, so that what is behind it is reached.
std::string seal(const std::string& manifest) {
  const auto body = manifest.substr(0, manifest.rfind(",\n\"crc32c\""));
  char crc[9];
  std::snprintf(crc, sizeof crc, "%08x", io::crc32c(std::as_bytes(std::span(body))));
  return body + ",\n\"crc32c\": \"" + crc + "\"\n}\n";
}

// The bytes of every tensor.
Files read_all(const std::string& path) {
  CheckpointReader reader(path);
  Files tensors;
  for (const auto& [name, record] : reader.manifest().tensors) {
    // What a changed manifest claims need not fit into memory.
    if (layout::numel_of(record.shape) > 1000) throw CheckpointError(name + " is too large");
    std::string bytes(static_cast<size_t>(layout::numel_of(record.shape)) * 4, '\0');
    reader.read(name, Box::whole(record.shape), std::as_writable_bytes(std::span(bytes)));
    tensors[name] = bytes;
  }
  return tensors;
}

TEST(CheckpointMutations, AMutatedCheckpointIsReadRightOrRefused) {
  const test_support::MemoryDir dir;
  const auto path = save_numbers(
      dir.path(), 1,
      {{{"w", "I32", {6, 4}, {{{0, 2}, {0, 4}}}},
        {"v", "F32", {3, 4}, {{{0, 3}, {0, 1}}}},
        {"s", "I32", {}, Box::whole({})}},
       {{"w", "I32", {6, 4}, {{{2, 4}, {0, 4}}}},
        {"v", "F32", {3, 4}, {{{0, 3}, {1, 3}}}},
        {"e", "I32", {0, 3}, Box::whole({0, 3})}},
       {{"w", "I32", {6, 4}, {{{4, 6}, {0, 4}}}}, {"v", "F32", {3, 4}, {{{0, 3}, {3, 4}}}}}});
  Files files;
  for (const auto& name :
       {std::string("manifest.json"), shard_file_name(1), shard_file_name(2), shard_file_name(3)}) {
    files[name] = test::read_file(path + "/" + name);
  }
  const Files expected = read_all(path);
  ASSERT_EQ(expected.size(), 4u);

  std::mt19937 random(1);
  const auto any = [&] { return std::next(files.begin(), random() % files.size()); };
  int unchanged = 0, harmless = 0, other = 0;
  const int mutants = test::tests_all() ? 1'000'000 : 5'000;
  for (int i = 0; i < mutants; ++i) {
    const auto& [name, bytes] = *any();
    const bool sealed = name == "manifest.json" && random() % 4 != 0;
    std::string changed =
        random() % 16 == 0 ? any()->second : test_support::mutate(bytes, random, kPieces);
    if (sealed) changed = seal(changed);
    test::write_file(path + "/" + name, changed);
    try {
      const Files found = read_all(path);
      if (changed == bytes) {
        ++unchanged;
        ASSERT_EQ(found, expected) << i;
      } else if (!sealed) {
        // White space in front of a manifest's end is not changed unnoticed either.
        ADD_FAILURE() << "mutant " << i << " of " << name << " was not noticed";
      } else {
        ++(found == expected ? harmless : other);
      }
    } catch (const CheckpointError&) {
      ASSERT_NE(changed, bytes) << i;
    } catch (const ConfigError&) {
      ASSERT_TRUE(sealed) << i;  // a type that is wider than this test reads
    }
    test::write_file(path + "/" + name, bytes);
  }
  // The mutants that are read are those with a checksum of their own: other steps, slices that have
  // changed places.
  EXPECT_GT(unchanged, mutants / 500);
  EXPECT_GT(harmless, mutants / 2000);
  EXPECT_LT(harmless + other, mutants / 4);
}

}  // namespace
}  // namespace lockstep::formats
