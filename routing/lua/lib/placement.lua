-- placement: which servers may run a job, and which of them is best.

local CHOICES = 16 -- eligible servers that are compared, those that are free longest

-- As policies/placement.py reads numbers: tonumber() alone would take 0x10 and nan for some.
local function number_in(text) return string.find(text, "^%-?%d[%d.]*[eE]?[-+]?%d*$") and tonumber(text) end

-- `needs` has a condition a line: `gpu=A100,H100` (one of these) or `memory>=40`.  A server that does not declare
-- what is asked for does not meet it; an attribute of the model (`zimg:version`) goes before one of the server.
local function matches(needs, entry, model)
  for name, operator, wanted in string.gmatch(needs, "([^<>=\n]+)([<>]?=)([^\n]*)") do
    local has = nil
    for _, prefix in ipairs({ "\n@" .. model .. ":" .. name .. "=", "\n@" .. name .. "=" }) do
      local _, stop = string.find(entry, prefix, 1, true)
      if stop and not has then has = string.match(entry, "^[^\n]*", stop + 1) end
    end
    if not has then return false end
    if operator == ">=" or operator == "<=" then
      local number, bound = number_in(has), number_in(wanted)
      if not number or not bound or (operator == ">=" and number < bound) then return false end
      if operator == "<=" and number > bound then return false end
    else
      local met = false
      for one in string.gmatch(wanted, "[^,]+") do
        met = met or string.find("," .. has .. ",", "," .. one .. ",", 1, true) ~= nil
      end
      if not met then return false end
    end
  end
  return true
end

-- The parts of a server's score for a model, and their sum over its weight: the lowest is best.
local function score_of(server, entry, model, now)
  local stats = stats_key("server", server)
  local found = redis.call("HMGET", stats, "taken", "loaded", "run_ms:" .. model)
  local mean = tonumber(redis.call("HGET", stats_key("model", model), "run_ms") or "0")
  local parts = {
    load = math.max(tonumber(found[1] or "0"), 0) / slots_in(entry),
    failures = penalty(stats, now),
    slowness = found[3] and mean > 0 and math.min(math.max(tonumber(found[3]) / mean - 1, -0.5), 2) or 0,
    swap = found[2] and found[2] ~= model and 1 or 0,
  }
  local weight = tonumber(string.match(entry, "^%a+ %d+ (%S+)") or "1")
  parts.total = (1 + parts.load + parts.failures + parts.slowness + parts.swap) / weight
  return parts
end
