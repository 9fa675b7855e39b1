// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "lockstep/core/error.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/safetensors_writer.h"
#include "tests/formats/save.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::formats {
namespace {

using test::says;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string file_with(const std::string& header, size_t data_size) {
  std::string size(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(size.data(), &length, 8);
  return size + header + std::string(data_size, 'x');
}

class Safetensors : public ::testing::Test {
 protected:
  std::string path() const { return folder_.path() + "/f.safetensors"; }
  SafetensorsFile open(const std::string& bytes) const {
    test::write_file(path(), bytes);
    return SafetensorsFile(path());
  }
  // Every message begins with the file.
  void refused(const std::string& bytes, const std::string& rule) const {
    EXPECT_THAT([&] { open(bytes); },
                ThrowsMessage<CheckpointError>(AllOf(HasSubstr(path() + ": "), says(rule))));
  }
  void header_refused(const std::string& header, const std::string& rule,
                      size_t data_size = 8) const {
    refused(file_with(header, data_size), rule);
  }

  test::TempDir folder_;
};

// What the reference implementation writes for b = F32 [1, 2] and a = BF16 [[1, 2, 3]].
const std::string kGolden =
    std::string("\x90\0\0\0\0\0\0\0", 8) +
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
    R"("a":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}  )" +
    std::string("\x00\x00\x80\x3f\x00\x00\x00\x40\x80\x3f\x00\x40\x40\x40", 14);

TEST_F(Safetensors, ReadsGolden) {
  const auto file = open(kGolden);
  EXPECT_THAT(file.entries(), ElementsAre(SafetensorsEntry{"b", "F32", {2}, 0, 8},
                                          SafetensorsEntry{"a", "BF16", {1, 3}, 8, 14}));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  float b[2];
  std::memcpy(b, file.bytes(file.at("b")).data(), 8);
  EXPECT_EQ(b[1], 2.0f);
  EXPECT_EQ(file.bytes(file.at("a")).size(), 6u);
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_THAT([&] { file.at("c"); }, ThrowsMessage<CheckpointError>(HasSubstr("has no tensor c")));
}

TEST_F(Safetensors, WritesGolden) {
  SafetensorsWriter writer(path(), {{"a", "BF16", {1, 3}}, {"b", "F32", {2}}});
  EXPECT_EQ(writer.entries()[0].name, "b");
  writer.write("b", as_bytes(kGolden).subspan(152, 3));
  writer.write("b", as_bytes(kGolden).subspan(155, 5));
  writer.write("a", as_bytes(kGolden).subspan(160));
  const auto record = writer.finish();
  EXPECT_EQ(test::read_file(path()), kGolden);
  EXPECT_EQ(record, test_support::record_of(path()));
  EXPECT_EQ(record.bytes, kGolden.size());
}

TEST_F(Safetensors, OrderAndAlignment) {
  std::vector<SafetensorsTensor> tensors;
  for (const char* type :
       {"BOOL", "U8", "I8", "F8_E4M3", "F16", "BF16", "I32", "F32", "I64", "F64"}) {
    tensors.push_back({std::string("z") + type, type, {3}});
    tensors.push_back({std::string("a") + type, type, {}});
    tensors.push_back({std::string("m") + type, type, {0, 5}});
  }
  SafetensorsWriter writer(path(), tensors);
  std::vector<std::string> names;
  for (const auto& entry : writer.entries()) {
    names.push_back(entry.name);
    writer.write(entry.name, as_bytes(std::string(entry.size(), 'y')));
  }
  writer.finish();
  EXPECT_EQ(names.front(), "aI64");
  EXPECT_EQ(names[3], "aF64");
  EXPECT_EQ(names.back(), "zBOOL");
  const SafetensorsFile file(path());
  EXPECT_EQ(file.entries(), writer.entries());
  for (const auto& entry : file.entries()) {
    const auto dtype = dtype_of(entry.dtype);
    if (!dtype) continue;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file.bytes(entry).data()) % size_of(*dtype), 0u);
  }
}

// More than the writer buffers, in odd pieces.
TEST_F(Safetensors, LargeTensors) {
  std::string bytes(5'000'004, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 31 >> 3);
  SafetensorsWriter writer(
      path(), {{"a", "U8", {1'000'001}}, {"b", "F32", {1'000'000, 1}}, {"c", "U8", {3}}});
  auto rest = as_bytes(bytes);
  size_t piece = 1;
  for (const auto& entry : writer.entries()) {
    for (uint64_t left = entry.size(); left > 0;) {
      const auto now = std::min<size_t>(left, piece);
      writer.write(entry.name, rest.first(now));
      rest = rest.subspan(now);
      left -= now;
      piece = piece * 3 % 2'500'001;
    }
  }
  const auto record = writer.finish();
  EXPECT_EQ(record, test_support::record_of(path()));
  EXPECT_EQ(test::read_file(path()).substr(record.bytes - bytes.size()), bytes);
}

TEST_F(Safetensors, EmptyFiles) {
  SafetensorsWriter writer(path(), {}, {});
  writer.finish();
  EXPECT_EQ(test::read_file(path()), file_with("{}      ", 0));
  EXPECT_TRUE(SafetensorsFile(path()).entries().empty());
}

TEST_F(Safetensors, WriterRules) {
  SafetensorsWriter writer(path(), {{"a", "U8", {4}}, {"b", "U8", {2}}});
  const auto bytes = as_bytes("12345");
  const auto misused = [&](std::string_view name, size_t size, const char* rule) {
    EXPECT_THAT([&] { writer.write(name, bytes.first(size)); },
                ThrowsMessage<ConfigError>(says(rule)));
  };
  misused("b", 2, "2 bytes of b ... 4 bytes of a");
  misused("a", 5, "5 bytes of a ... 4 bytes of a");
  writer.write("a", bytes.first(4));
  EXPECT_THAT([&] { writer.finish(); },
              ThrowsMessage<ConfigError>(HasSubstr("2 bytes of b are missing")));
  writer.write("b", bytes.first(2));
  misused("b", 1, "after all tensors");
  writer.finish();

  const auto refused = [&](std::vector<SafetensorsTensor> tensors, const char* rule) {
    EXPECT_THAT([&] { SafetensorsWriter(path(), tensors); },
                ThrowsMessage<ConfigError>(says(rule)));
  };
  refused({{"a", "U8", {}}, {"a", "I8", {}}}, "named twice");
  refused({{"__metadata__", "U8", {}}}, "reserved");
  refused({{"a", "F33", {}}}, "known type");
  refused({{"a", "F4", {3}}}, "whole number ... bytes");
  refused({{"a", "U8", {-1}}}, "whole number ... bytes");
  refused({{"a", "U8", {int64_t{1} << 62, 2}}}, "below 2^63");
  refused({{"\xff", "U8", {}}}, "UTF-8");
  EXPECT_THAT([&] { SafetensorsWriter(folder_.path() + "/none/f", {}); },
              ThrowsMessage<SystemError>(HasSubstr("/none/f")));
}

TEST_F(Safetensors, SizesOfHeader) {
  EXPECT_THAT([&] { SafetensorsFile(folder_.path() + "/none"); },
              ThrowsMessage<SystemError>(HasSubstr("/none")));
  refused("", "0 bytes ... 8 or more");
  refused("1234567", "7 bytes");
  refused(std::string(8, '\0'), "must begin with {");
  refused(std::string(8, '\xff') + "{}", "18446744073709551615 bytes ... at most 100000000");
  refused(std::string("\x03\0\0\0\0\0\0\0{}", 10), "3 bytes ... file of 10");
  header_refused(" {}", "must begin with {", 0);
  header_refused("[]", "must begin with {", 0);
  header_refused(std::string("{}\0\0", 4), "zero byte", 0);
  header_refused("{}x", "not valid JSON", 0);
  header_refused("{", "not valid JSON", 0);
  header_refused("{\"\xff\":1}", "not valid JSON", 0);
}

TEST_F(Safetensors, Members) {
  const auto tensor = [](const std::string& dtype, const std::string& shape,
                         const std::string& offsets) {
    return R"("a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
           "}";
  };
  const auto whole = tensor("\"F32\"", "[2]", "[0,8]");
  EXPECT_NO_THROW(open(file_with("{" + whole + "}\n ", 8)));
  header_refused("{" + whole + "," + whole + "}", "tensor a ... twice");
  header_refused("{" + whole + R"(,"__metadata__":{"k":"v","k":"w"}})", "key k is given twice");
  header_refused("{" + whole + R"(,"__metadata__":{},"__metadata__":{}})", "given twice");
  header_refused("{" + whole + R"(,"__metadata__":{"k":1}})", "strings only ... 1");
  header_refused("{" + whole + R"(,"__metadata__":{"k":{}}})", "strings only");
  header_refused("{" + whole + R"(,"__metadata__":[]})", "__metadata__ ... object");
  header_refused(R"({"a":{"dtype":"F32","dtype":"F32"}})", "dtype ... twice");
  header_refused(R"({"a":{"dtype":"F32","shape":[2]}})", "tensor a: has no data_offsets");
  header_refused(R"({"a":{"extra":1}})", "unknown member extra");
  header_refused(R"({"a":1})", "tensor a ... object, not 1");
  header_refused("{" + tensor("\"F33\"", "[2]", "[0,8]") + "}", "dtype F33 is not known");
  header_refused("{" + tensor("1", "[2]", "[0,8]") + "}", "dtype ... hold 1");
  header_refused("{" + tensor("[1]", "[2]", "[0,8]") + "}", "dtype ... hold an array");
  header_refused("{" + tensor("\"F32\"", "[-2]", "[0,8]") + "}", "shape ... hold -2");
  header_refused("{" + tensor("\"F32\"", "[2.0]", "[0,8]") + "}", "shape ... hold 2.0");
  header_refused("{" + tensor("\"F32\"", "[[2]]", "[0,8]") + "}", "shape ... hold an array");
  header_refused("{" + tensor("\"F32\"", "\"2\"", "[0,8]") + "}", "shape ... hold a string");
  header_refused("{" + tensor("\"F32\"", "2", "[0,8]") + "}", "shape ... hold 2");
  header_refused("{" + tensor("\"F32\"", "[2]", "[0,18446744073709551616]") + "}", "must not hold");
  header_refused("{" + tensor("\"F32\"", "[2]", "[0,18446744073709551615]") + "}", "below 2^63");
  header_refused("{" + tensor("\"F32\"", "[2]", "[0,1e999]") + "}", "not valid JSON");
  header_refused("{" + tensor("\"F32\"", "[2]", "[0,8,8]") + "}", "more than 2 numbers");
  header_refused("{" + tensor("\"F32\"", "[2]", "[8]") + "}", "data_offsets ... two numbers");
  header_refused("{" + tensor("\"F32\"", "[2]", "[8,0]") + "}", "run backwards");
  std::string ones = "[1";
  for (int i = 0; i < 64; ++i) ones += ",1";
  header_refused("{" + tensor("\"U8\"", ones + "]", "[0,1]") + "}", "more than 64 numbers", 1);
  header_refused(R"({"a":)" + std::string(1'000'000, '['), "tensor a: ... object");
  header_refused(R"({"a":{"shape":)" + std::string(1'000'000, '{'), "shape ... hold an object");
}

TEST_F(Safetensors, Tiling) {
  const auto two = [](const std::string& a, const std::string& b) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
           R"(},"b":{"dtype":"I16","shape":[2],"data_offsets":)" + b + "}}";
  };
  EXPECT_EQ(open(file_with(two("[4,8]", "[0,4]"), 8)).entries()[0].name, "b");
  header_refused(two("[0,4]", "[5,9]"), "tensor b I16 (2) ... begins at byte 5", 9);
  header_refused(two("[0,4]", "[3,7]"), "begins at byte 3", 7);
  header_refused(two("[1,5]", "[5,9]"), "tensor a U8 (4): begins at byte 1", 9);
  header_refused(two("[0,4]", "[4,8]"), "ends at byte 8 ... 7 bytes", 7);
  header_refused(two("[0,4]", "[4,8]"), "byte 8 ... 9 bytes", 9);
  header_refused(two("[0,3]", "[3,7]"), "hold 3 bytes, must be 4", 7);
  header_refused("{}", "byte 0 ... 1 bytes", 1);
  const auto one = [](const std::string& type, const std::string& shape) {
    return R"({"a":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":[0,8]}})";
  };
  header_refused(one("F32", "[9223372036854775807,9223372036854775807]"), "below 2^63");
  header_refused(one("F64", "[2305843009213693953]"), "below 2^63");
  header_refused(one("F4", "[15]"), "whole number ... bytes");
  EXPECT_NO_THROW(open(file_with(one("F4", "[16]"), 8)));
  header_refused(one("F32", "[4611686018427387904,4611686018427387904,0]"), "below 2^63");
}

TEST(DTypeNames, RoundTrip) {
  for (int i = 0; i <= static_cast<int>(DType::boolean); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_of(safetensors_name(dtype)), dtype);
    EXPECT_EQ(byte_size(safetensors_name(dtype), {3, 2}), 6 * static_cast<int64_t>(size_of(dtype)));
  }
  EXPECT_EQ(safetensors_name(DType::bfloat16), "BF16");
  EXPECT_EQ(dtype_of("U64"), std::nullopt);
  EXPECT_EQ(byte_size("F32", {}), 4);
  EXPECT_EQ(byte_size("F32", {0, 7}), 0);
  EXPECT_EQ(byte_size("F6_E2M3", {4}), 3);
}

}  // namespace
}  // namespace lockstep::formats
