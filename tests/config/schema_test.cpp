// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/schema/schema.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/config/schema/schema_text.h"
#include "lockstep/core/error.h"
#include "tests/support/says.h"

namespace lockstep::config {
namespace {

using test::says;
using testing::HasSubstr;
using testing::ThrowsMessage;

enum class Fruit { apple, sour_cherry, pear };

struct Bowl {
  int64_t count = 3;
  int small = 1;
  double weight = 0.5;
  bool ripe = false;
  std::string owner = "me";
  Fruit fruit = Fruit::apple;
  std::string kind = "fresh";
  std::vector<double> sizes = {1, 2.5};
  int64_t room = 0;
  std::optional<int64_t> guests = std::nullopt;
  std::optional<bool> cold = std::nullopt;
  std::optional<Fruit> next = std::nullopt;
  std::string share = "0.05";

  bool operator==(const Bowl&) const = default;
};

Schema schema_of(Bowl& bowl) {
  Schema schema;
  schema.section("bowl", "The bowl");
  schema.add("count", bowl.count, "How many.", {.min = 0, .max = 100});
  schema.add("small", bowl.small, "A small number.");
  schema.add("weight", bowl.weight, "How heavy.", {.min = 0, .max = 1, .below_max = true});
  schema.add("ripe", bowl.ripe, "Can be eaten.");
  schema.add("owner", bowl.owner, "Whose.");
  schema.add_choice("fruit", bowl.fruit, {"apple", "sour-cherry", "pear"}, "What.");
  schema.add_choice("kind", bowl.kind, {"fresh", "dry"}, "In what state.");
  schema.section("more", "More of it");
  schema.add("sizes", bowl.sizes, "Of each.", {.min = 0});
  schema.add_bytes("room", bowl.room, "Bytes.");
  schema.add("guests", bowl.guests, "How many come.", {.min = 0});
  schema.add("cold", bowl.cold, "Is it?");
  schema.add_choice("next", bowl.next, {"apple", "sour-cherry", "pear"}, "What comes.");
  schema.add_text_or_number("share", bowl.share, "A fraction or a name.");
  return schema;
}

struct SchemaTest : testing::Test {
  Bowl bowl;
  Schema schema = schema_of(bowl);

  auto refused_flag(const std::string& name, const std::string& text, const std::string& message) {
    EXPECT_THAT([&] { schema.set_flag(name, text); }, ThrowsMessage<ConfigError>(says(message)));
  }
  void refused_text(const std::string& text, const std::string& message) {
    EXPECT_THAT([&] { schema.read_text(text, "f"); }, ThrowsMessage<ConfigError>(says(message)));
  }
};

TEST_F(SchemaTest, FlagsOfEveryType) {
  for (const auto& [name, text] :
       std::vector<std::pair<std::string, std::string>>{{"bowl.count", "1_0"},
                                                        {"bowl.small", "-7"},
                                                        {"bowl.weight", "2.5e-1"},
                                                        {"bowl.ripe", "true"},
                                                        {"bowl.owner", "a b"},
                                                        {"bowl.fruit", "sour_cherry"},
                                                        {"bowl.kind", "dry"},
                                                        {"more.sizes", "3,4"},
                                                        {"more.room", "1.5GB"},
                                                        {"more.guests", "12"},
                                                        {"more.cold", "false"},
                                                        {"more.next", "pear"},
                                                        {"more.share", "some/file"}})
    schema.set_flag(name, text);
  const Bowl expected{.count = 10,
                      .small = -7,
                      .weight = 0.25,
                      .ripe = true,
                      .owner = "a b",
                      .fruit = Fruit::sour_cherry,
                      .kind = "dry",
                      .sizes = {3, 4},
                      .room = 3LL << 29,
                      .guests = 12,
                      .cold = false,
                      .next = Fruit::pear,
                      .share = "some/file"};
  EXPECT_EQ(bowl, expected);
  for (const char* name : {"more.guests", "more.cold", "more.next"}) schema.set_flag(name, "auto");
  EXPECT_FALSE(bowl.guests || bowl.cold || bowl.next);
}

const char* const kToml = R"(# a bowl
more.room = 4096
[bowl]   # first
count = +1_0
weight = 0            # a whole number will do
ripe= true
owner ="C:\\\"x\" \u00e9#"
"fruit" = 'sour-cherry'
[ more ]
sizes = [ 3, 4.5e0, ]
share = 0.50
guests = "auto"
cold = false
)";

TEST_F(SchemaTest, ReadsToml) {
  schema.read_text(kToml, "f");
  const Bowl expected{.count = 10,
                      .weight = 0,
                      .ripe = true,
                      .owner = "C:\\\"x\" \xc3\xa9#",
                      .fruit = Fruit::sour_cherry,
                      .sizes = {3, 4.5},
                      .room = 4096,
                      .cold = false,
                      .share = "0.5"};
  EXPECT_EQ(bowl, expected);
}

TEST_F(SchemaTest, ReadsJsonNestedAndDotted) {
  schema.read_text(R"(
    {"bowl": {"count": 10, "weight": 0, "ripe": true, "fruit": "sour-cherry"},
     "more.sizes": [3, 4.5], "more": {"room": "4KB", "cold": false, "share": 0.5, "next": "auto"}})",
                   "f");
  const Bowl expected{.count = 10,
                      .weight = 0,
                      .ripe = true,
                      .fruit = Fruit::sour_cherry,
                      .sizes = {3, 4.5},
                      .room = 4096,
                      .cold = false,
                      .share = "0.5"};
  EXPECT_EQ(bowl, expected);
}

TEST_F(SchemaTest, FlagOverFileOverDefault) {
  schema.set_flag("bowl.count", "7");
  schema.read_text("[bowl]\ncount = 8\nsmall = 9\n", "f");
  EXPECT_EQ(bowl.count, 7);
  EXPECT_EQ(bowl.small, 9);
  schema.set_flag("bowl.small", "10");
  schema.set_flag("bowl.small", "11");
  EXPECT_EQ(bowl.small, 11);
  const Origins origins = schema.origins();
  EXPECT_EQ(origins.at("bowl.count"), Origin::flag);
  EXPECT_EQ(origins.at("bowl.small"), Origin::flag);
  EXPECT_EQ(origins.at("bowl.weight"), Origin::by_default);
  schema.read_text("bowl.weight = 0.75", "f");
  EXPECT_EQ(schema.origins().at("bowl.weight"), Origin::file);
  // What a flag hides must still be right.
  refused_text("bowl.count = 'x'",
               "f:1: bowl.count is \"x\" ... whole number ... at least 0 ... at most 100");
  EXPECT_EQ(bowl.count, 7);
}

TEST_F(SchemaTest, WrongFlags) {
  const std::string count = " ... whole number ... at least 0 ... at most 100";
  refused_flag("bowl.count", "many", "--bowl.count is 'many'" + count);
  refused_flag("bowl.count", "1.5", "--bowl.count is '1.5'" + count);
  refused_flag("bowl.count", "101", "--bowl.count is '101'" + count);
  refused_flag("bowl.count", "", "--bowl.count is ''" + count);
  refused_flag("bowl.count", "99999999999999999999",
               "--bowl.count is '99999999999999999999'" + count);
  refused_flag("bowl.small", "3000000000",
               "--bowl.small is '3000000000' ... whole number ... at least -2147483648 ... at most "
               "2147483647");
  refused_flag("bowl.weight", "1", "--bowl.weight is '1' ... number ... at least 0 ... below 1");
  refused_flag("bowl.weight", "nan",
               "--bowl.weight is 'nan' ... number ... at least 0 ... below 1");
  refused_flag("bowl.ripe", "yes", "--bowl.ripe is 'yes' ... true or false");
  refused_flag("bowl.fruit", "plum", "--bowl.fruit is 'plum' ... apple, sour-cherry, pear");
  refused_flag("more.next", "plum", "--more.next is 'plum' ... apple, sour-cherry, pear, auto");
  refused_flag("more.sizes", "1,x", "--more.sizes is '1,x' ... list of numbers ... at least 0");
  refused_flag("more.sizes", "1,-1", "--more.sizes is '1,-1' ... list of numbers ... at least 0");
  refused_flag("more.room", "8XB", "--more.room is '8XB' ... size ... at least 0");
  refused_flag("more.room", "-1", "--more.room is '-1' ... size ... at least 0");
  refused_flag("more.guests", "all",
               "--more.guests is 'all' ... whole number ... at least 0, or auto");
  EXPECT_EQ(bowl, Bowl{});
}

TEST_F(SchemaTest, UnknownNamesGetASuggestion) {
  refused_flag("bowl.coutn", "1", "--bowl.coutn ... bowl.count");
  refused_flag("more.cuont", "1", "--more.cuont ... more.cold");
  refused_flag("weight", "1", "--weight ... bowl.weight");
  refused_flag("xyzzy.quux", "1", "--xyzzy.quux ... --help");
  refused_text("\n\n[bowls]\ncount = 1", "f:4: bowls.count ... bowl.count");
  refused_text(R"({"bowl": {"cuont": 1}})", "f: bowl.cuont ... bowl.count");
}

TEST_F(SchemaTest, WrongFiles) {
  refused_text("[bowl]\ncount = \"3\"",
               "f:2: bowl.count is \"3\" ... whole number ... at least 0 ... at most 100");
  refused_text("[bowl]\nripe = 1", "f:2: bowl.ripe is 1 ... true or false");
  refused_text("[bowl]\nowner = 1", "f:2: bowl.owner is 1 ... a string");
  refused_text("[bowl]\ncount = 1\ncount = 2", "f:3: bowl.count is set twice");
  refused_text("bowl.count = 1\n[bowl]\ncount = 2", "f:3: bowl.count is set twice");
  refused_text("[bowl]\n[more]\n[bowl]", "f:3: section [bowl] ... second time");
  refused_text("[bowl", "f:1: ] must follow [bowl");
  refused_text("[bowl] x", "f:1: ... 'x'");
  refused_text("[[bowl]]", "f:1: lists of tables");
  refused_text("[bowl]\ncount 1", "f:2: = must follow count");
  refused_text("[bowl]\ncount =", "f:2: a value ... =");
  refused_text("[bowl]\n= 1", "f:2: a key ... '= 1'");
  refused_text("[bowl]\ncount = 1 2", "f:2: ... '2'");
  refused_text("[bowl]\nowner = me", "f:2: me ... not a number ... quotes");
  refused_text("[bowl]\nowner = \"me", "f:2: a string ... on the line");
  refused_text("[bowl]\nowner = \"\"\"me\"\"\"", "f:2: strings ... several lines");
  refused_text("[bowl]\nowner = \"\\q\"", "f:2: \\q ... escape of TOML ... \\\\");
  refused_text("[bowl]\nowner = \"\\u12\"", "f:2: \\u ... 4 hexadecimal digits");
  refused_text("bowl = {count = 1}", "f:1: inline tables ... [section] ... dotted keys");
  refused_text("more.sizes = [1,", "f:1: a list ... on the line");
  refused_text("more.sizes = ['a']", "f:1: ['a'] ... list of numbers");
  refused_text("bowl.day = 1979-05-27", "f:1: 1979-05-27 ... not a number ... quotes");
  refused_text(R"({"bowl": {"count": 1, "count": 2}})", "f: key count ... twice");
  refused_text(R"({"bowl": {"count": 1}, "bowl.count": 2})", "f: bowl.count is set twice");
  refused_text(R"({"bowl": {"count": null}})",
               "f: bowl.count is null ... number ... string ... list of numbers");
  EXPECT_THAT([&] { schema.read_text("{\n\"bowl\": }", "f"); },
              ThrowsMessage<ConfigError>(
                  testing::AllOf(HasSubstr("f: not valid JSON"), HasSubstr("line 2"))));
  EXPECT_THAT([&] { schema.read_file("/nowhere/x.toml"); },
              ThrowsMessage<ConfigError>(says("/nowhere/x.toml: No such file or directory")));
  EXPECT_THAT([&] { schema.read_file("/tmp"); },
              ThrowsMessage<ConfigError>(says("/tmp ... folder ... regular file")));
}

TEST_F(SchemaTest, CheckSeesValuesThatNoFlagGave) {
  EXPECT_NO_THROW(schema.check());
  bowl.weight = std::nan("");
  EXPECT_THAT(
      [&] { schema.check(); },
      ThrowsMessage<ConfigError>(says("bowl.weight is nan ... number ... at least 0 ... below 1")));
}

TEST_F(SchemaTest, WrittenFilesReadBackTheSame) {
  bowl = {.count = 42,
          .small = -3,
          .weight = 0.1 + 0.2 - 0.05,
          .ripe = true,
          .owner = "a \"b\"\\\n\t\x01\x7f \xc3\xa9 # [x] = 'y'",
          .fruit = Fruit::sour_cherry,
          .kind = "dry",
          .sizes = {1e-300, 1e22, 3},
          .room = 5LL << 40,
          .guests = 0,
          .cold = true,
          .next = Fruit::pear,
          .share = "7"};
  for (const bool other : {false, true}) {
    if (other) {
      bowl.owner = bowl.share = "";
      bowl.sizes = {};
      bowl.guests.reset();
      bowl.cold.reset();
      bowl.next.reset();
      bowl.room = 1025;
    }
    for (const std::string& text : {toml_text(schema), json_text(schema)}) {
      Bowl read{.count = 1, .owner = "z", .sizes = {9}, .guests = 3, .cold = false};
      schema_of(read).read_text(text, "written");
      EXPECT_EQ(read, bowl) << text;
    }
  }
}

TEST_F(SchemaTest, TomlHasOrigins) {
  schema.set_flag("bowl.count", "7");
  schema.read_text("[bowl]\nweight = 0.25\nfruit = \"sour_cherry\"", "f");
  EXPECT_THAT(toml_text(schema), HasSubstr("[bowl]\n"
                                           "count = 7                                 # flag\n"
                                           "small = 1                                 # default\n"
                                           "weight = 0.25                             # file\n"));
  EXPECT_THAT(toml_text(schema), HasSubstr("\nfruit = \"sour-cherry\" "));
  Bowl other = bowl;
  Schema again = schema_of(other);
  again.restore(schema.origins());
  EXPECT_EQ(toml_text(again), toml_text(schema));
}

TEST_F(SchemaTest, HelpHasDefaultsChoicesAndFits) {
  const std::string help = help_text(schema);
  EXPECT_THAT(help, HasSubstr("\nThe bowl:\n  --bowl.count N                  How many. [3]\n"));
  EXPECT_THAT(help,
              HasSubstr("--more.next NAME                What comes. {apple|sour-cherry|pear|auto} "
                        "[auto]\n"));
  bowl.count = 5;  // help is about defaults, not about present values
  EXPECT_EQ(help_text(schema), help);
  EXPECT_THAT(markdown_text(schema), HasSubstr("| `bowl.count` | `3` | How many. |\n"));
}

TEST(Value, Bytes) {
  EXPECT_EQ(parse_bytes("8GB"), 8LL << 30);
  EXPECT_EQ(parse_bytes("8 GiB"), 8LL << 30);
  EXPECT_EQ(parse_bytes("8G"), 8LL << 30);
  EXPECT_EQ(parse_bytes("0.5KB"), 512);
  EXPECT_EQ(parse_bytes("48 kB"), 48 << 10);
  EXPECT_EQ(parse_bytes("12"), 12);
  EXPECT_EQ(parse_bytes("12B"), 12);
  EXPECT_EQ(parse_bytes("9000000PB"), std::nullopt);
  EXPECT_EQ(parse_bytes("GB"), std::nullopt);
  EXPECT_EQ(parse_bytes("1.5"), std::nullopt);
  EXPECT_EQ(parse_bytes(""), std::nullopt);
  EXPECT_EQ(bytes_text(8LL << 30), "8GB");
  EXPECT_EQ(bytes_text(1536), "1536");
  EXPECT_EQ(bytes_text(1536 << 10), "1536KB");
  EXPECT_EQ(bytes_text(0), "0");
}

TEST(Value, Numbers) {
  EXPECT_EQ(parse_integer("1_000"), 1000);
  EXPECT_EQ(parse_integer("+5"), 5);
  for (const char* text : {"", "_1", "1_", "1__0", "+-5", "0x10", " 1", "1 ", "--1"})
    EXPECT_EQ(parse_integer(text), std::nullopt) << text;
  for (const char* text : {"inf", "nan", "1e999", "1,5", "1f"})
    EXPECT_EQ(parse_number(text), std::nullopt) << text;
  EXPECT_EQ(parse_numbers("[]"), std::vector<double>{});
  EXPECT_EQ(parse_numbers("1, 2,"), (std::vector<double>{1, 2}));
  EXPECT_EQ(parse_numbers("[1, 2"), std::nullopt);
  EXPECT_EQ(parse_numbers("1,,2"), std::nullopt);
  EXPECT_EQ(toml_literal(1.0), "1.0");
  EXPECT_EQ(toml_literal(1e22), "1e+22");
  EXPECT_EQ(toml_literal(0.1), "0.1");
}

TEST(Value, EditDistance) {
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("", "abc"), 3u);
  EXPECT_EQ(edit_distance("abc", "abc"), 0u);
  EXPECT_EQ(edit_distance("ab", "ba"), 2u);
}

}  // namespace
}  // namespace lockstep::config
