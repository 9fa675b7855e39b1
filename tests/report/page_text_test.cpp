// SPDX-License-Identifier: Apache-2.0
// Pages of runs that were written by hand: what is long, hostile, torn or of another version.
#include "lockstep/report/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/report/findings.h"
#include "lockstep/report/markup.h"
#include "lockstep/report/text.h"
#include "tests/support/says.h"
#include "tests/support/subprocess.h"

namespace lockstep::report {
namespace {

using test::says;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

// What a rank that computes `slow` times as long as the others leaves behind.
std::string line_of(int step, double slow = 1) {
  return format(
      R"({{"step":{},"time":{},"loss":{},"grad_norm":1,"lr":0.001,"tokens":{},"tokens_per_s":1000,)"
      R"("step_ms":100,"peak_bytes":1000000,"split":{{"compute_ms":60,"communication_ms":20,)"
      R"("bubble_ms":5,"optimizer_ms":5,"data_ms":1,"checkpoint_ms":0,"stall_ms":9}},)"
      R"("busy_ms":[66,{},66],"rank_peak_bytes":[1,2,3]}})",
      step, 1.8e9 + step, 2.0 + 1.0 / step, 1000 * step, 66 * slow);
}

class ReportPage : public testing::Test {
 protected:
  std::string folder(const std::string& name = "run") const { return folder_.path() + "/" + name; }
  void write(const std::string& file, const std::string& text,
             const std::string& name = "run") const {
    std::filesystem::create_directories(folder(name));
    test::write_file(folder(name) + "/" + file, text);
  }
  static std::string lines(int count, double slow = 1) {
    std::string text;
    for (int step = 1; step <= count; ++step) text += line_of(step, slow) + "\n";
    return text;
  }

  const test::TempDir folder_;
};

TEST_F(ReportPage, OfAHundredThousandStepsIsSmall) {
  write("metrics.jsonl", lines(100'000));
  const auto run = read_run(folder(), rows_of_page(1));
  EXPECT_EQ(run.steps.count(), 100'000);
  const std::string html = page({run});
  EXPECT_LT(html.size(), 500'000u);
  EXPECT_THAT(html, HasSubstr("100k"));
}

TEST_F(ReportPage, HasNothingOfTheRunThatABrowserWouldRun) {
  const std::string name = "a \"'><script>alert(1)<!-- \xf0\x9f\x98\x80 \xff&lt;";
  const std::string text = R"(</script><script>alert(2)</script><img src=x onerror=alert(3)>)";
  write("metrics.jsonl", lines(3), name);
  write(
      "events.jsonl",
      format(
          R"({{"event":"warning","step":1,"text":"{0}"}}{1}{{"event":"{0}","step":2}}{1}{{"event":"sample","step":2,"prompt":"{0}","text":"{0}"}}{1}{{"event":"health","step":2,"layers":["{0}"],"grad_norm":[1],"update_ratio":[1]}}{1})",
          text, "\n"),
      name);
  write("config.toml", "[x]\ny = \"" + text + "\"\n", name);
  const std::string html = page({read_run(folder(name))});
  // The script of the page, and the data; no other, and none of the run's tags.
  size_t scripts = 0;
  for (size_t at = 0; (at = html.find("<script", at)) != std::string::npos; ++at) ++scripts;
  EXPECT_EQ(scripts, 2u);
  EXPECT_THAT(html, Not(HasSubstr("<img")));
  EXPECT_THAT(html, HasSubstr("script-src 'sha256-"));
  EXPECT_THAT(html, HasSubstr("default-src 'none'"));
  EXPECT_THAT(html, HasSubstr("\xf0\x9f\x98\x80"));  // the emoji stays
  EXPECT_THAT(html, Not(HasSubstr("\xff")));
}

TEST_F(ReportPage, EscapesWhatMarkupGivesAMeaning) {
  EXPECT_EQ(escaped("<a href=\"x\">'&"), "&lt;a href=&quot;x&quot;&gt;&#39;&amp;");
  EXPECT_EQ(escaped("\xc3\xa4 \xc3( \xed\xa0\x80 \x1b"), "\xc3\xa4 ?( ??? ?");
  EXPECT_EQ(script_json(R"({"a":"</script>&"})"), R"({"a":"\u003c/script\u003e\u0026"})");
}

TEST_F(ReportPage, IsWrittenOfTornAndForeignFiles) {
  write("metrics.jsonl",
        "{\"step\":1,\"loss\":3}\nnot "
        "JSON\n{\"step\":\"x\",\"loss\":null}\n[1]\n{\"step\":2,\"loss\":2.5,\"split\":7,\"busy_"
        "ms\":\"x\"}\n{\"step\":3,\"lo");
  write("events.jsonl",
        "{\"event\":\"ranks\",\"ranks\":[1,{}],\"schedule\":\"rubbish\"}\n{\"event\":5}\n{"
        "\"event\":\"communication\",\"operations\":{\"x\":1}}\n");
  write("environment.jsonl", "{\"ranks\":[{\"host\":\"h\",\"pid\":\"x\"}]}\n");
  write("config.toml", "[unknown]\nkey = 1\n");
  const auto run = read_run(folder());
  EXPECT_EQ(run.steps.count(), 3);
  EXPECT_EQ(run.bad_lines, 2);  // the last line may be in the making
  EXPECT_FALSE(run.config);
  EXPECT_EQ(run.steps.last(kLoss), 2.5);
  EXPECT_THAT(page({run}), HasSubstr("</html>"));
  EXPECT_THAT(text_report(run), HasSubstr("2.5000"));
}

TEST_F(ReportPage, OfARunWithoutAStepSaysSo) {
  write("metrics.jsonl", "");
  EXPECT_THAT(page({read_run(folder())}), HasSubstr("No step"));
  EXPECT_THAT(text_report(read_run(folder())), says("no step"));
}

TEST_F(ReportPage, RefusesWhatIsNoRun) {
  for (const auto& [path, why] : {std::pair(folder_.path(), "config.toml ... metrics.jsonl"),
                                  {folder("gone"), "not a folder"}}) {
    try {
      read_run(path);
      ADD_FAILURE() << path;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(), says(why));
    }
  }
}

TEST_F(ReportPage, NamesTheSlowRankAndWhereTheTimeGoes) {
  write("metrics.jsonl", lines(20, 3));
  const auto run = read_run(folder());
  EXPECT_THAT(stragglers(run), testing::ElementsAre(1));
  const auto parts = shares(run);
  ASSERT_EQ(parts.size(), 6u);
  EXPECT_EQ(parts[0].name, "compute");
  EXPECT_NEAR(parts[0].part, 0.6, 1e-9);
  const std::string text = text_report(run);
  EXPECT_THAT(text, HasSubstr("rank 1 is slow"));
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 40) << text;
  EXPECT_THAT(page({run}), HasSubstr("rank 1 is slow"));
}

TEST_F(ReportPage, HasTheBalanceOfRanksThatShareRows) {
  std::string text;
  for (int step = 1; step <= 4; ++step)  // the pairs 0, 1 and 2, 3 share rows
    text += format("{{\"step\":{},\"loss\":1,\"busy_ms\":[90,100,60,100]}}\n", step);
  write("metrics.jsonl", text);
  write("config.toml", "[parallel]\ncp = 2\n[data]\npack = true\n");
  EXPECT_THAT(
      text_report(read_run(folder())),
      says("balance ... parallel.cp 2 ... 80 % ... short documents ... smaller parallel.cp"));
  write("config.toml", "[parallel]\ncp = 2\n[train]\nreproducible = true\n");  // 0, 2 and 1, 3
  EXPECT_THAT(text_report(read_run(folder())), says("balance ... 83 %"));
  // Without such ranks, with fewer ranks than the configuration has, and before the first step.
  for (const char* text : {"[parallel]\ncp = 1\n", "[parallel]\ncp = 3\n",
                           "[parallel]\ncp = 8\n[train]\nreproducible = true\n"}) {
    write("config.toml", text);
    EXPECT_THAT(text_report(read_run(folder())), testing::Not(HasSubstr("balance"))) << text;
  }
  write("config.toml", "[parallel]\ncp = 2\n");
  write("metrics.jsonl", "");
  EXPECT_THAT(text_report(read_run(folder())), testing::Not(HasSubstr("balance")));
}

TEST_F(ReportPage, LaysRunsOverEachOther) {
  write("metrics.jsonl", lines(20), "first");
  write("metrics.jsonl", lines(30), "second");
  write("config.toml", "[optim]\nlr = 0.1   # flag\nclip = 1.0  # default\n", "first");
  write("config.toml", "[optim]\nlr = 0.2   # flag\nclip = 1.0  # default\n", "second");
  const std::string html = page({read_run(folder("first")), read_run(folder("second"))});
  const size_t at = html.find("Differences");
  ASSERT_NE(at, std::string::npos);
  const std::string differences = html.substr(at, html.find("All settings", at) - at);
  EXPECT_THAT(differences, HasSubstr("optim.lr"));
  EXPECT_THAT(differences, Not(HasSubstr("optim.clip")));
  EXPECT_THAT(table_of_runs({read_run(folder("first")), read_run(folder("second"))}),
              testing::AllOf(HasSubstr("\nfirst"), HasSubstr("\nsecond")));
}

}  // namespace
}  // namespace lockstep::report
