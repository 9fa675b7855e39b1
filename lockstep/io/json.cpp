// SPDX-License-Identifier: Apache-2.0
#include "lockstep/io/json.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::io {
namespace {

constexpr int kMaxDepth = 32;

[[noreturn]] void fail_json(const std::string& origin, const std::string& rule) {
  throw CheckpointError(format("{}: {}", origin, rule));
}

}  // namespace

std::string reason_of(const Json::exception& failure) {
  const std::string text = failure.what();
  const auto end = text.find("] ");
  return end == std::string::npos ? text : text.substr(end + 2);
}

namespace {

// `Fails` throws with the rule that was broken.
template <class AnyJson, class Fails>
AnyJson parse(std::string_view text, const Fails& fails) {
  // The parser takes a zero byte for the end of its input.
  if (text.find('\0') != std::string_view::npos) fails("holds a zero byte");
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, typename AnyJson::parse_event_t event, AnyJson& parsed) {
    using Event = typename AnyJson::parse_event_t;
    if (event == Event::object_start || event == Event::array_start) {
      if (depth >= kMaxDepth) fails(format("nested deeper than {} levels", kMaxDepth));
      keys.emplace_back();
    } else if (event == Event::object_end || event == Event::array_end) {
      keys.pop_back();
    } else if (event == Event::key) {
      const auto& key = parsed.template get_ref<const std::string&>();
      if (!keys.back().insert(key).second) fails(format("key {} is given twice", key));
    }
    return true;
  };
  try {
    return AnyJson::parse(text.begin(), text.end(), watch);
  } catch (const Json::exception& failure) {
    std::string reason = reason_of(failure);
    // Of a line of a file it would be taken for the line in the file.
    constexpr std::string_view kLine = "line 1, ";
    const size_t at = reason.find(kLine);
    if (at != std::string::npos && text.find('\n') == std::string_view::npos)
      reason.erase(at, kLine.size());
    fails("not valid JSON: " + reason);
  }
  return {};
}

}  // namespace

Json parse_json(std::string_view text, const std::string& origin) {
  return parse<Json>(text, [&](const std::string& rule) { fail_json(origin, rule); });
}

OrderedJson parse_user_json(std::string_view text, const std::string& origin) {
  return parse<OrderedJson>(
      text, [&](const std::string& rule) { throw ConfigError(format("{}: {}", origin, rule)); });
}

Json parse_json_line(std::string_view text) {
  try {
    return parse_json(text, "");
  } catch (const CheckpointError&) {
    return Json(Json::value_t::discarded);
  }
}

const Json& member(const Json& object, const char* key, const std::string& origin) {
  if (!object.is_object()) fail_json(origin, "must be an object");
  const auto found = object.find(key);
  if (found == object.end()) fail_json(origin, format("has no {}", key));
  return *found;
}

std::string string_member(const Json& object, const char* key, const std::string& origin) {
  const auto& value = member(object, key, origin);
  if (!value.is_string()) fail_json(origin, format("{} must be a string", key));
  return value.get<std::string>();
}

const Json& object_member(const Json& object, const char* key, const std::string& origin) {
  const auto& value = member(object, key, origin);
  if (!value.is_object()) fail_json(origin, format("{} must be an object", key));
  return value;
}

int64_t integer(const Json& value, const std::string& origin) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{INT64_MAX}) {
    fail_json(origin, format("{} must be a whole number, at least 0 and below 2^63", value.dump()));
  }
  return value.get<int64_t>();
}

void require_only(const Json& object, std::initializer_list<std::string_view> keys,
                  const std::string& origin) {
  if (!object.is_object()) fail_json(origin, "must be an object");
  for (const auto& [key, value] : object.items()) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      fail_json(origin, format("has an unknown member {}", key));
    }
  }
}

}  // namespace lockstep::io
