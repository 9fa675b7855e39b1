// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/formats/shard_file.h"
#include "lockstep/io/crc32c.h"
#include "lockstep/layout/shard_math.h"
#include "tests/support/says.h"

namespace lockstep::formats {
namespace {

using layout::Box;
using test::says;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Manifest sample() {
  return {
      .step = 100,
      .tensors = {{"w", {"F32", {8, 4}, {{"f", {{{0, 4}, {0, 4}}}}, {"g", {{{4, 8}, {0, 4}}}}}}},
                  {"qkv",
                   {"BF16", {6}, {{"f", {{{0, 2}}}}, {"f2", {{{4, 6}}}}, {"g", {{{2, 4}}}}}}},
                  {"scalar", {"I64", {}, {{"g", Box::whole({})}}}},
                  {"empty", {"F32", {0, 3}, {{"g", Box::whole({0, 3})}}}}},
      .files = {{"f", {123, {0xabcdef}}},
                {"f2", {0, {}}},
                {"g", {2 * io::kBlockBytes + 1, {1, 2, 0xffffffff}}}},
      .state = {{"samples", "18446744073709551615"}, {"scaler", R"({"scale":65536.1})"}},
      .config = R"({"model":{"layers":2}})"};
}

TEST(Manifest, RoundTrip) {
  const auto text = sample().to_json();
  EXPECT_EQ(Manifest::from_json(text, "m"), sample());
  EXPECT_EQ(Manifest::from_json(text, "m").to_json(), text);
  EXPECT_EQ(Manifest::from_json(Manifest{}.to_json(), "m"), Manifest{});
  EXPECT_THAT(
      text,
      HasSubstr(
          R"("scalar": {"dtype":"I64","shape":[],"slices":[{"file":"g","offsets":[],"shape":[]}]})"));
}

// The text of version 2, which later versions of Lockstep must read.
TEST(Manifest, Frozen) {
  Manifest manifest{.step = 7};
  manifest.files["f"] = {io::kBlockBytes + 1, {0x0a, 0xfedcba98}};
  manifest.tensors["w"] = {"F32", {2, 3}, {{"f", Box::whole({2, 3})}}};
  manifest.state["tokens"] = "12";
  EXPECT_EQ(manifest.to_json(), R"({
"format": "lockstep.checkpoint",
"version": 2,
"step": 7,
"config": {},
"state": {
"tokens": 12
},
"files": {
"f": {"bytes":1048577,"crc32c":["0000000a","fedcba98"]}
},
"tensors": {
"w": {"dtype":"F32","shape":[2,3],"slices":[{"file":"f","offsets":[0,0],"shape":[2,3]}]}
},
"crc32c": "bc5f5246"
}
)");
}

// Text with a right checksum, so that what is behind it is reached.
std::string sealed(const std::string& text) {
  const auto body = text.substr(0, text.rfind(",\n\"crc32c\""));
  char crc[9];
  std::snprintf(crc, sizeof crc, "%08x", io::crc32c(std::as_bytes(std::span(body))));
  return body + ",\n\"crc32c\": \"" + crc + "\"\n}\n";
}

TEST(Manifest, EveryDamagedBitIsNoticed) {
  const auto text = sample().to_json();
  for (size_t i = 0; i < text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      auto damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << bit));
      ASSERT_THROW(Manifest::from_json(damaged, "m"), CheckpointError) << i << " " << bit;
    }
    ASSERT_THROW(Manifest::from_json(text.substr(0, i), "m"), CheckpointError) << i;
  }
}

TEST(Manifest, StrictText) {
  const auto text = sample().to_json();
  const auto refused = [&](const std::string& from, const std::string& to, const char* rule) {
    const auto at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    const auto changed = sealed(std::string(text).replace(at, from.size(), to));
    EXPECT_THAT([&] { Manifest::from_json(changed, "dir/manifest.json"); },
                ThrowsMessage<CheckpointError>(AllOf(HasSubstr("dir/manifest.json"), says(rule))));
  };
  refused("\"version\": 2", "\"version\": 1", "version 1, this Lockstep reads version 2");
  refused("\"version\": 2", "\"version\": 3", "version 3, this Lockstep reads version 2");
  refused("lockstep.checkpoint", "other", "not a checkpoint's");
  refused("\"step\": 100", "\"step\": 100, \"step\": 100", "key step ... twice");
  refused("\"step\": 100", "\"step\": -1", "-1 ... whole number");
  refused("\"step\": 100", "\"step\": 1.5", "1.5 ... whole number");
  refused("\"step\": 100,", "", "has no step");
  refused("\"step\": 100", "\"step\": 1, \"more\": 1", "unknown member more");
  refused("00abcdef", "abcdef", "8 hexadecimal digits");
  refused("00abcdef", "00abcdeg", "8 hexadecimal digits");
  refused("\"00abcdef\"", "12345678", "file f: crc32c 12345678 must be 8 hexadecimal digits");
  refused("[\"00abcdef\"]", "\"00abcdef\"", "file f: crc32c ... array");
  refused("[\"00abcdef\"]", "[]", "file f: 123 bytes with 0 checksums, must have 1");
  refused("\"bytes\":123", "\"bytes\":1048577", "1048577 bytes with 1 checksums, must have 2");
  refused("\"bytes\":123", "\"bytes\":9223372036854775807", "must have 8796093022208");
  refused("\"bytes\":123", "\"bytes\":9223372036854775808", "below 2^63");
  refused("\"file\":\"f\"", "\"file\":\"../f\"", "file ../f ... list of files");
  refused("\"file\":\"f\"", "\"file\":\"f\",\"key\":\"x\"", "unknown member key");
  refused("\"f2\": {", "\"../f2\": {", "file '../f2' ... plain name");
  refused("\"f2\": {", "\"a/f2\": {", "file 'a/f2' ... plain name");
  refused("\"bytes\":123", "\"bytes\":\"123\"", "file f: \"123\" ... whole number");
  refused("\"offsets\":[4,0]", "\"offsets\":[4]", "must have 2 numbers each");
  refused("\"offsets\":[4,0]", "\"offsets\":[5,0]", "tensor w: a slice: offsets (5, 0) and shape");
  refused("\"offsets\":[4,0]", "\"offsets\":[9223372036854775807,0]", "reach outside");
  refused("\"shape\":[8,4]", "\"shape\":[8,9223372036854775807]", "below 2^63");
  refused("BF16", "BF17", "known type");
  refused("{\"layers\":2}", std::string(40, '[') + std::string(40, ']'), "nested deeper than 32");
  EXPECT_THAT([&] { Manifest::from_json(text + " ", "m"); },
              ThrowsMessage<CheckpointError>(says("checksum")));
}

TEST(Manifest, Tiling) {
  const auto refused = [](layout::Shape shape, std::vector<Box> boxes, const std::string& rule) {
    Manifest manifest;
    int file = 0;
    for (const auto& box : boxes) {
      const auto name = std::to_string(++file);
      manifest.files[name] = {};
      manifest.tensors["w"].slices.push_back({name, box});
    }
    manifest.tensors["w"].dtype = "F32";
    manifest.tensors["w"].shape = std::move(shape);
    if (rule.empty()) {
      EXPECT_NO_THROW(manifest.validate("m"));
    } else {
      EXPECT_THAT([&] { manifest.validate("m"); },
                  ThrowsMessage<CheckpointError>(AllOf(HasSubstr("m: tensor w F32"), says(rule))));
    }
  };
  refused({4, 4}, {{{{0, 4}, {0, 4}}}}, "");
  refused({4, 4}, {{{{0, 2}, {0, 4}}}, {{{2, 4}, {0, 1}}}, {{{2, 4}, {1, 4}}}}, "");
  refused({4, 4}, {}, "slices hold 0 of 16 elements; missing: [0:4, 0:4]");
  refused({4, 4}, {{{{0, 2}, {0, 4}}}, {{{2, 4}, {0, 1}}}},
          "slices hold 10 of 16 elements; missing: [2:4, 1:4]");
  refused({4, 4}, {{{{1, 3}, {1, 3}}}}, "missing: [0:1, 0:4], [3:4, 0:4], [1:3, 0:1], [1:3, 3:4]");
  refused({8},
          {
              {{{1, 2}}},
              {{{3, 4}}},
              {{{5, 6}}},
              {{{7, 8}}},
          },
          "missing: [0:1], [2:3], [4:5], [6:7]");
  refused({10}, {{{{1, 2}}}, {{{3, 4}}}, {{{5, 6}}}, {{{7, 8}}}}, "and 1 more");
  // The volume is right, and yet one element is twice there and one not at all.
  refused({4}, {{{{0, 2}}}, {{{1, 3}}}}, "slices [0:2] in 1 and [1:3] in 2 overlap");
  refused({2, 4}, {{{{0, 1}, {0, 4}}}, {{{0, 2}, {3, 4}}}, {{{1, 2}, {1, 3}}}}, "overlap");
  refused({4}, {{{{0, 4}}}, {{{0, 4}}}}, "overlap");
  refused({4}, {{{{0, 5}}}}, "slice [0:5] in 1 ... outside");
  refused({4}, {{{{-1, 3}}}, {{{3, 4}}}}, "lies outside");
  refused({4}, {{{{0, 4}, {0, 1}}}}, "has 2 dimensions, must have 1");
  refused({4}, {{{{0, 4}}}, {{{4, 4}}}}, "is empty");
  refused({0}, {{{{0, 0}}}}, "");
  refused({0}, {}, "slices hold 0 of 0 elements");
  refused({0}, {{{{0, 0}}}, {{{0, 0}}}}, "no elements ... 2 slices");
  refused({}, {{{{0, 1}}}}, "");
  refused({}, {{{{0, 1}}}, {{{0, 1}}}}, "overlap");
}

// Many slices along either dimension, quickly.
TEST(Manifest, ManySlices) {
  for (const bool rows : {true, false}) {
    Manifest manifest;
    auto& tensor = manifest.tensors["w"];
    tensor = {"F32", rows ? layout::Shape{20'000, 2} : layout::Shape{2, 20'000}, {}};
    for (int64_t i = 0; i < 20'000; ++i) {
      const layout::Range one{i, i + 1};
      const layout::Range both{0, 2};
      tensor.slices.push_back({std::to_string(i), rows ? Box{{one, both}} : Box{{both, one}}});
      manifest.files[tensor.slices.back().file] = {};
    }
    EXPECT_NO_THROW(manifest.validate("m"));
    tensor.slices[777].box.ranges[rows ? 0 : 1] = {778, 779};
    EXPECT_THROW(manifest.validate("m"), CheckpointError);
  }
}

TEST(Manifest, Files) {
  const auto refused = [](const auto& change, const char* rule) {
    auto manifest = sample();
    change(manifest);
    EXPECT_THAT([&] { manifest.validate("m"); }, ThrowsMessage<CheckpointError>(says(rule)));
  };
  refused([](Manifest& m) { m.files.erase("g"); }, "file g ... list of files");
  refused([](Manifest& m) { m.files["../x"] = {}; }, "file '../x' ... plain name");
  refused([](Manifest& m) { m.files[".x"] = {}; }, "'.x' ... plain name");
  refused([](Manifest& m) { m.files[""] = {}; }, "'' ... plain name");
  refused([](Manifest& m) { m.files["manifest.json"] = {}; }, "'manifest.json' ... plain name");
  refused([](Manifest& m) { m.tensors["qkv"].slices[1].file = "f"; },
          "tensor qkv BF16 (6) ... two slices in f");
  refused([](Manifest& m) { m.tensors[""] = m.tensors["scalar"]; }, "has no name");
  refused([](Manifest& m) { m.step = -1; }, "step -1");
  auto manifest = sample();
  manifest.state["bad"] = "{";
  EXPECT_THAT([&] { manifest.to_json(); }, ThrowsMessage<ConfigError>(HasSubstr("state bad")));
  manifest = sample();
  manifest.config = "";
  EXPECT_THAT([&] { manifest.to_json(); }, ThrowsMessage<ConfigError>(HasSubstr("config")));
}

TEST(Manifest, MergesParts) {
  const auto slice = [](int64_t begin, int64_t end) {
    return ShardSlice{"w", "F32", {8}, {{{begin, end}}}};
  };
  auto manifest = shard_manifest(3, shard_file_name(1), {10, {1}}, {slice(0, 3)});
  const auto other = shard_manifest(3, shard_file_name(2), {20, {2}}, {slice(3, 8)});
  EXPECT_THROW(manifest.validate("m"), CheckpointError);
  manifest.merge(Manifest::part_from_json(other.to_json(), "part"));
  EXPECT_NO_THROW(manifest.validate("m"));
  EXPECT_EQ(manifest.files.size(), 2u);

  const auto refused = [&](const Manifest& part, const char* rule) {
    EXPECT_THAT([&] { manifest.merge(part); }, ThrowsMessage<CheckpointError>(says(rule)));
  };
  refused(other, "two parts");
  refused({.step = 4}, "parts of steps 3 and 4");
  refused({.step = 3, .tensors = {{"w", {"F16", {8}, {}}}}}, "tensor w is F32 (8) in one part");
  refused({.step = 3, .tensors = {{"w", {"F32", {9}, {}}}}}, "F32 (9) in another");
  manifest.state["seed"] = "1";
  refused({.step = 3, .state = {{"seed", "2"}}}, "state seed is 1 ... 2 in another");
}

TEST(ShardFile, Names) {
  EXPECT_EQ(shard_file_name(1), "shard-00001-model-00001-of-00001.safetensors");
  EXPECT_EQ(shard_file_name(12, 3, 4), "shard-00012-model-00003-of-00004.safetensors");
  EXPECT_THROW(shard_file_name(0), ConfigError);
  EXPECT_THROW(shard_file_name(1, 2, 1), ConfigError);
}

TEST(ShardFile, Parts) {
  const auto parts = [](const std::vector<const char*>& names) {
    std::vector<ShardSlice> slices;
    for (const char* name : names) slices.push_back({name, "U8", {4}, {{{0, 1}}}});
    return shard_parts(slices);
  };
  using Parts = std::vector<std::vector<size_t>>;
  EXPECT_EQ(parts({}), Parts{});
  EXPECT_EQ(parts({"b", "a"}), (Parts{{0, 1}}));
  EXPECT_EQ(parts({"q", "a", "q", "k", "q", "k"}), (Parts{{0, 1, 3}, {2, 5}, {4}}));
}

}  // namespace
}  // namespace lockstep::formats
