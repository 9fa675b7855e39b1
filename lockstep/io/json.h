// SPDX-License-Identifier: Apache-2.0
// JSON read with nothing let pass: keys given twice, deep nesting, bytes that are not UTF-8. All
// JSON that Lockstep has not written a moment before in the same process comes through here.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace lockstep::io {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

// Of a file that is read as JSON.
inline constexpr uint64_t kMaxJsonBytes = uint64_t{256} << 20;

// Throws CheckpointError; `origin` names the text in it. Containers nest at most 32 deep.
Json parse_json(std::string_view text, const std::string& origin);
// The same for what a user writes: keys in their order, and ConfigError.
OrderedJson parse_user_json(std::string_view text, const std::string& origin);
// A line of a file of lines; discarded() where it is not whole.
Json parse_json_line(std::string_view text);

// Members by name and type. All throw CheckpointError that begins with `origin`.
const Json& member(const Json& object, const char* key, const std::string& origin);
std::string string_member(const Json& object, const char* key, const std::string& origin);
const Json& object_member(const Json& object, const char* key, const std::string& origin);
int64_t integer(const Json& value, const std::string& origin);  // at least 0, below 2^63
// Refuses members that are not in the list.
void require_only(const Json& object, std::initializer_list<std::string_view> keys,
                  const std::string& origin);

// nlohmann's messages begin with "[json.exception.parse_error.101] "; readers want the rest.
std::string reason_of(const Json::exception& failure);

}  // namespace lockstep::io
