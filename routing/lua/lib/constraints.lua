-- constraints: whether a server meets what a job requires.  routing/admission/constraints.py reads the same text.

-- As routing/admission/constraints.py reads numbers: tonumber() alone would accept 0x10 and nan.
local function parse_number(text) return string.find(text, "^%-?%d[%d.]*[eE]?[-+]?%d*$") and tonumber(text) end

-- `constraints` has a condition a line: `gpu=A100,H100` (one of these) or `memory>=40`.  A server that does not declare
-- an attribute does not meet its condition; an attribute of the model (`zimg:version`) comes before one of the server.
local function meets_constraints(constraints, entry, model)
  if constraints == "" then return true end
  for name, operator, wanted in string.gmatch(constraints, "([^<>=\n]+)([<>]?=)([^\n]*)") do
    local declared = nil
    for _, prefix in ipairs({ "\n@" .. model .. ":" .. name .. "=", "\n@" .. name .. "=" }) do
      local _, stop = string.find(entry, prefix, 1, true)
      if stop and not declared then declared = string.match(entry, "^[^\n]*", stop + 1) end
    end
    if not declared then return false end
    if operator == ">=" or operator == "<=" then
      local number, bound = parse_number(declared), parse_number(wanted)
      if not number or not bound or (operator == ">=" and number < bound) then return false end
      if operator == "<=" and number > bound then return false end
    else
      local met = false
      for one in string.gmatch(wanted, "[^,]+") do
        met = met or string.find("," .. declared .. ",", "," .. one .. ",", 1, true) ~= nil
      end
      if not met then return false end
    end
  end
  return true
end
