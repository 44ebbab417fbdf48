"""Common names of the columns of logs, and of the actions in them."""

from __future__ import annotations

import re

from dualenc.data.readers.column_names import CLICKED, DOCUMENT_IDS, IMAGES, QUERIES, VECTORS

QUERY = (*QUERIES, "user_query", "query_string", "search_phrase", "text", *VECTORS, *IMAGES)
DOCUMENT = (
    *DOCUMENT_IDS,
    *("object_id", "event_attributes_object_object_id"),
    *(f"clicked_{name}" for name in ("doc_id", "document_id", "item_id", "product_id", "sku")),
    *CLICKED,
    *("id", "_id"),
)
SHOWN = (
    *("query_response_hit_ids", "shown", "shown_ids", "shown_docs", "results", "result_ids"),
    *("hits", "hit_ids", "displayed", "displayed_ids", "impressions", "ranking", "ranked_ids"),
    *("serp", "candidates", "retrieved", "retrieved_ids", "returned", "returned_ids"),
)
"""Lists of what was shown, clicked or not."""
LISTED = (
    *(f"{name}s" for name in (*DOCUMENT_IDS, "object_id")),
    *("documents", "docs", "items", "products", "articles", "ids"),
)
"""Lists of documents: shown if there is a column of clicks beside them."""
CLICKED_LISTS = (
    *("clicked", "clicks", "clicked_ids", "clicked_id", "clicked_docs", "clicked_documents"),
    *("clicked_items", "clicked_products", "clicked_results", "clicked_hits", "selected"),
    *(f"clicked_{name}" for name in DOCUMENT_IDS),
    *(f"clicked_{name}s" for name in DOCUMENT_IDS),
)
"""Which of the documents of a list were clicked, by id."""
CLICKED_RANKS = (
    *("clicked_rank", "clicked_ranks", "clicked_position", "clicked_positions"),
    *("click_rank", "click_ranks", "click_position", "click_positions"),
)
"""Which of the documents of a list were clicked, by rank."""
POSITION = (
    *("position", "rank", "pos", "position_ordinal", "event_attributes_position_ordinal"),
    *("ordinal", "result_position", "result_rank", "display_position", "display_rank"),
    *("click_position", "click_rank", "clicked_position", "clicked_rank", "serp_position"),
    *("event_attributes_rank", "item_list_index", "list_position", "positions", "ranks"),
)
RESULTS_LIST = (
    *("search_id", "request_id", "impression_id", "serp_id", "list_id", "results_id"),
    *("query_response_id", "searchid", "requestid", "srch_id"),
)
"""Columns that name one results list."""
SESSION = (
    *("session_id", "session", "sid", "sessionid", "visit_id", "visit"),
    *("ga_session_id", "domain_sessionid"),
)
USER = (
    *("user_id", "user", "client_id", "visitor_id", "customer_id", "cookie_id"),
    *("user_pseudo_id", "domain_userid", "user_token", "anonymous_id"),
)
TIME = (
    *("timestamp", "_timestamp", "@timestamp", "event_time", "click_time", "clicked_at", "time"),
    *("datetime", "ts", "created_at", "query_time", "search_time", "unix_time", "epoch"),
    *("event_timestamp", "collector_tstamp", "derived_tstamp"),
    *("date", "day", "dt", "event_date", "log_date", "ds"),
)
ACTION = (
    *("action_name", "action", "event_type", "event_name", "event", "action_type"),
    *("interaction", "interaction_type", "behavior", "behavior_type", "user_action"),
)
IMPRESSIONS = (
    *("impressions", "impression_count", "num_impressions", "n_impressions", "times_shown"),
    *("views", "view_count", "num_views", "n_views", "displays", "exposures"),
)
WEIGHT = ("weight", "weights", "pair_weight", "teacher_score")

_SHOWING_ONLY = (
    "impression impressions view viewed views show shown showing display displayed exposure "
    "exposed serve served seen render rendered results search on_search query hover viewed_item "
    "view_item_list view_search_results"
)
SHOWING_ONLY = frozenset(_SHOWING_ONLY.split())
"""Actions that say that a document was shown, and no more."""
_CHOOSING = (
    "click clicks clicked click_through clickthrough select selected open opened cart "
    "add_to_cart atc addtocart buy bought order ordered purchase purchased checkout conversion "
    "convert like liked thumbs_up upvote save saved favorite bookmark share watch download play "
    "read"
)
CHOOSING = frozenset(_CHOOSING.split())
"""Actions that say that a user chose a document. Others count the same: see `action_weights`."""
_REJECTING = (
    "thumbs_down thumb_down dislike disliked downvote skip skipped hide hidden dismiss "
    "dismissed report reported return returned refund refunded remove_from_cart "
    "removed_from_cart reject rejected not_clicked no_click not_relevant irrelevant unlike "
    "cancel cancelled canceled"
)
REJECTING = frozenset(_REJECTING.split())
"""Actions against a document, which need a weight of the user's choice."""

LAST_WORDS = frozenset(
    ["impression", "impressions", "shown", "displayed", "click", "clicks", "clicked"]
)
"""Last words of names, such as search_result_click, that say what the action is."""

IS_RANKS = re.compile(r"rank|position|ordinal|index")
"""Names of columns of ranks rather than ids."""
IS_BEHAVIOR = re.compile(r"click|purchas|conver|bought|order|cart")
"""Names of labels that count actions, so that 3 is three clicks and not a grade."""
IS_PURCHASE = re.compile(r"purchas|conver|bought|order")
