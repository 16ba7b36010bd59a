-- constraints: whether a server meets what a job requires.  routing/admission/constraints.py reads the same text.

local meets_constraints = nil -- luacheck: ignore 311 (set below; without a value it would last one call)

do -- what a server declares
  -- As routing/admission/constraints.py reads numbers: tonumber() alone would accept 0x10 and nan.
  local function parse_number(text) return string.find(text, "^%-?%d[%d.]*[eE]?[-+]?%d*$") and tonumber(text) end

  -- Return what a server declares of an attribute, nil: nothing.  An attribute of the model (`zimg:version`) comes
  -- before one of the server.
  local function declared_by(entry, model, name)
    for _, prefix in ipairs({ "\n@" .. model .. ":" .. name .. "=", "\n@" .. name .. "=" }) do
      local _, stop = string.find(entry, prefix, 1, true)
      if stop then return string.match(entry, "^[^\n]*", stop + 1) end
    end
  end

  local function is_one_of(wanted, declared)
    return string.find("," .. declared .. ",", "," .. wanted .. ",", 1, true) ~= nil
  end

  -- Return whether a server runs jobs that name no environment.
  local function serves_production(entry, model)
    if not string.find(entry, "environment=", 1, true) then return true end
    return is_one_of("production", declared_by(entry, model, "environment") or "production")
  end

  -- `constraints` has a condition a line: `gpu=A100,H100` (one of these) or `memory>=40`.  A server that does not
  -- declare an attribute does not meet its condition.
  function meets_constraints(constraints, entry, model)
    if not string.find("\n" .. constraints, "\nenvironment=", 1, true) and not serves_production(entry, model) then
      return false
    end
    for name, operator, wanted in string.gmatch(constraints, "([^<>=\n]+)([<>]?=)([^\n]*)") do
      local declared = declared_by(entry, model, name)
      if not declared then return false end
      if operator == ">=" or operator == "<=" then
        local number, bound = parse_number(declared), parse_number(wanted)
        if not number or not bound or (operator == ">=" and number < bound) then return false end
        if operator == "<=" and number > bound then return false end
      else
        local met = false
        for one in string.gmatch(wanted, "[^,]+") do
          met = met or is_one_of(one, declared)
        end
        if not met then return false end
      end
    end
    return true
  end
end
