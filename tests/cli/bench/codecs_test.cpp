// SPDX-License-Identifier: Apache-2.0
// `lockstep bench codecs`: a row for each codec and kind of values, with what the codec promises.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::test {
namespace {

using testing::HasSubstr;

TEST(BenchCodecs, Json) {
  const Result result = lockstep_command({"bench", "codecs", "--elements", "10007", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const auto rows = nlohmann::json::parse(result.out);
  ASSERT_EQ(rows.size(), 6u * 3);
  for (const auto& row : rows) {
    EXPECT_EQ(row.size(), 8u);
    EXPECT_GT(row["encode_gbs"], 0);
    EXPECT_GT(row["decode_gbs"], 0);
    const std::string codec = row["codec"];
    const bool exact = codec == "none" || codec == "lossless";
    EXPECT_EQ(row["lossy"], !exact);
    EXPECT_EQ(row["max_error"] == 0, exact) << row;
    EXPECT_EQ(row["rms_error"] == 0, exact) << row;
    EXPECT_LE(row["rms_error"], 0.05) << row;
    const double ratio = exact ? 1 : codec == "fp16" || codec == "bf16" ? 0.5 : 0.254;
    EXPECT_NEAR(row["ratio"], ratio, codec == "lossless" ? 0.2 : 1e-3) << row;
    EXPECT_TRUE(codec != "bf16" || row["max_error"] <= 1.0 / 256) << row;
  }
  EXPECT_EQ(rows[0]["values"], "weights");
  EXPECT_EQ(rows[1]["values"], "exp_avg");
  EXPECT_EQ(rows[2]["values"], "exp_avg_sq");
}

TEST(BenchCodecs, Table) {
  const Result result = lockstep_command({"bench", "codecs", "--elements", "1"});
  ASSERT_EQ(result.code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("codec         values       ratio"));
  EXPECT_THAT(result.out, HasSubstr("quantization  exp_avg_sq"));
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 1 + 6 * 3);
}

TEST(BenchCodecs, WrongOptionsAreOneLine) {
  const Result result = lockstep_command({"bench", "codecs", "--elements", "0"});
  EXPECT_EQ(result.code, 2);
  EXPECT_THAT(result.err, says("lockstep: bench codecs: --elements: 0 ... whole number from 1"));
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
}

}  // namespace
}  // namespace lockstep::test
