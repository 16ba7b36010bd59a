--[[ offer: offer waiting jobs to free slots, as many as fit.  The sweep calls it; it catches what was missed.
  KEYS[1..12] the fleet's keys, see lib/fleet
  ARGV[1] prefix    random text that makes the names of new leases unique
  ARGV[2] limit     offers to make at most
  ARGV[3] offer_ms  how long an offer stays open
  Returns {{job, lease, slot, server, model, number, owner}…}
  Clock Redis TIME    Cost O(offers (classes + free slots + log n))    Upholds SLOT-2 ]]
-- @include lib/now_ms
-- @include lib/fleet
-- @include lib/slots
-- @include lib/order
-- @include lib/lanes
-- @include lib/breaker
-- @include lib/holding
-- @include lib/placement
-- @include lib/offer

return make_offers(tonumber(ARGV[2]), ARGV[1], now_ms(), tonumber(ARGV[3]), "", 0)
