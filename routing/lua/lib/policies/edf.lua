-- edf: earliest deadline first.  Jobs without a deadline come after all others, in the order of acceptance.
-- @include lib/policy
local edf = new_policy("edf")

-- Deadlines are compared in tenths of a second since 2020.  Of equal ones, the job that was accepted first is next: its
-- number is taken modulo 2^18, so that the score stays below 2^53.  Where the numbers wrap, two jobs of one deadline
-- can change places.
function edf.lane_score(seq, deadline)
  if deadline == 0 then return 2 ^ 52 + seq end
  return math.floor((deadline - 1577836800000) / 100) * 2 ^ 18 + seq % 2 ^ 18
end

function edf.head_key(_, score) return score end

function edf.priority_among_models() return PRIORITY_OF_ALL end

function edf.count_before(other, _, score) return count_accepted_before(other, score) end
