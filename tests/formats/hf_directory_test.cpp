// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/hf_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "lockstep/core/error.h"
#include "lockstep/formats/safetensors_writer.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::formats {
namespace {

using test::says;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

class Hf : public ::testing::Test {
 protected:
  void write(const std::string& file, const std::vector<std::string>& names) const {
    std::vector<SafetensorsTensor> tensors;
    for (const auto& name : names) tensors.push_back({name, "U8", {4}});
    SafetensorsWriter writer(dir_.path() + "/" + file, tensors);
    for (const auto& entry : writer.entries()) {
      writer.write(entry.name, std::as_bytes(std::span((entry.name + "----").data(), 4)));
    }
    writer.finish();
  }
  void index(const std::string& text) const {
    test::write_file(dir_.path() + "/model.safetensors.index.json", text);
  }
  std::string value(HfDirectory& model, const std::string& name) const {
    const auto tensor = model.find(name);
    EXPECT_EQ(tensor.dtype, "U8");
    EXPECT_EQ(tensor.shape, layout::Shape{4});
    return {reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()};
  }
  void refused(const std::string& rule) const {
    EXPECT_THAT([&] { HfDirectory(dir_.path()); },
                ThrowsMessage<CheckpointError>(AllOf(HasSubstr(dir_.path()), says(rule))));
  }

  test::TempDir dir_;
};

TEST_F(Hf, OneFile) {
  write("model.safetensors", {"b", "a"});
  HfDirectory model(dir_.path());
  EXPECT_THAT(model.names(), ElementsAre("a", "b"));
  EXPECT_EQ(value(model, "b"), "b---");
  EXPECT_FALSE(model.contains("c"));
  EXPECT_THAT([&] { model.find("c"); },
              ThrowsMessage<CheckpointError>(HasSubstr("has no tensor c among its 2")));
}

TEST_F(Hf, IndexAndShards) {
  write("model-00001-of-00003.safetensors", {"a", "extra"});
  write("model-00002-of-00003.safetensors", {"b"});
  index(R"({"metadata":{"total_size":12},"weight_map":{"a":"model-00001-of-00003.safetensors",
            "b":"model-00002-of-00003.safetensors","c":"model-00003-of-00003.safetensors",
            "d":"model-00001-of-00003.safetensors"}})");
  HfDirectory model(dir_.path());
  EXPECT_THAT(model.names(), ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(value(model, "b"), "b---");
  EXPECT_EQ(value(model, "a"), "a---");
  // Opened once: what happens to the name afterwards does not matter.
  std::filesystem::remove(dir_.path() + "/model-00002-of-00003.safetensors");
  EXPECT_EQ(value(model, "b"), "b---");
  EXPECT_THAT([&] { model.find("c"); },
              ThrowsMessage<SystemError>(HasSubstr("model-00003-of-00003.safetensors")));
  EXPECT_THAT([&] { model.find("d"); }, ThrowsMessage<CheckpointError>(HasSubstr(
                                            "model-00001-of-00003.safetensors: has no tensor d")));
}

TEST_F(Hf, Refused) {
  refused("has neither model.safetensors nor model.safetensors.index.json");
  index("{");
  refused("not valid JSON");
  index(R"({"weight_map":[]})");
  refused("weight_map ... object");
  index("{}");
  refused("has no weight_map");
  index(R"({"weight_map":{"a":"x","a":"y"}})");
  refused("key a ... twice");
  for (const char* file : {"\"../x\"", "\"/x\"", "\".x\"", "1", "\"\""}) {
    index(std::string(R"({"weight_map":{"a":)") + file + "}}");
    refused("tensor a: ");
  }
}

}  // namespace
}  // namespace lockstep::formats
